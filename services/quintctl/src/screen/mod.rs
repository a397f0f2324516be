//! The live table of the pods, with a panel for the details of one pod.
//!
//! The model computes the screen and the effect of a key, without a terminal. The loop owns the terminal: it
//! draws after each key, change and second, and restores the terminal at its end and on a panic. A task
//! fetches the content of the open panel; the content of a panel that was closed meanwhile is dropped. A task
//! of the supervisor kills a service on a key and sends reports.

mod model;

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crossterm::event::{Event, EventStream, KeyEventKind};
use futures::StreamExt as _;
use quintctl_text::{clean, now_ns};
use quintlet_kit::args::paths::Paths;
use quintlet_kit::task;
use quintlet_proto::podsync::v1::PodView;
use tokio::sync::{mpsc, watch};

use crate::error::Error;
use crate::view::{self, View};
use crate::{explain, logs, trace};
use model::{Content, KeyEffect, Kind, Model, PanelSource};

/// Interval of updates of ages and of the open panel.
const TICK: Duration = Duration::from_secs(1);

/// Number of last lines of a log in the panel.
const LOG_LINES: usize = 500;

/// Number of newest operations in the trace panel.
const OPERATIONS: usize = 5;

/// Capacity of the channel of reports: two for each killed service, and few are killed at once.
const REPORTS: usize = 4;

/// The sources of the content of panels.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    pub(crate) paths: Paths,
    pub(crate) pod_logs_dir: PathBuf,
}

/// The services that the user can kill.
pub(crate) struct Kills {
    /// Names, in the order of the digits that select them.
    pub(crate) names: Vec<&'static str>,
    /// Kills the service at an index of `names` and sends reports for the user.
    pub(crate) kill: Box<dyn Fn(usize, mpsc::Sender<String>) + Send + Sync>,
}

/// Returns whether standard input and output are a terminal that can show a live table.
#[must_use]
pub(crate) fn is_possible() -> bool {
    let dumb = std::env::var_os("TERM").is_none_or(|t| t.is_empty() || t == "dumb");
    !dumb && std::io::stdout().is_terminal() && std::io::stdin().is_terminal()
}

/// Shows the pods until the user quits. The argument of `header` is the width of the screen.
///
/// # Errors
/// The terminal cannot be used.
pub(crate) async fn follow(places: Places, header: impl Fn(usize) -> Vec<String>) -> Result<(), Error> {
    let (views, view) = watch::channel(View::default());
    let follower = task::spawn("follow pods", view::follow(places.paths.podsync(), views));
    let done = run(places, view, header, None).await;
    follower.abort();
    done
}

/// Shows the pods of `view` below the lines of `header` until the user quits.
///
/// Cancellation safety: dropping the future restores the terminal.
pub(crate) async fn run(
    places: Places,
    mut view: watch::Receiver<View>,
    header: impl Fn(usize) -> Vec<String>,
    kills: Option<Kills>,
) -> Result<(), Error> {
    let mut terminal = ratatui::try_init().map_err(Error::os("use the terminal"))?;
    let _restored = Restored;
    let mut keys = EventStream::new();
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // At most one fetch is in progress.
    let (contents, mut content) = quintlet_kit::queue::channel::<(PanelSource, Arc<Content>)>("contents", 1);
    let (reports, mut report) = quintlet_kit::queue::channel::<String>("kills", REPORTS);
    let mut busy = false;
    let mut model = Model::new(kills.as_ref().map(|k| k.names.clone()).unwrap_or_default());
    model.show(&view.borrow_and_update(), now_ns());
    loop {
        let width = terminal.size().map_err(Error::os("get the size of the terminal"))?.width;
        model.header = header(usize::from(width));
        terminal.draw(|frame| model.draw(frame)).map_err(Error::os("draw on the terminal"))?;
        // All arms only wait; dropping them loses nothing.
        let open = tokio::select! {
            key = keys.next() => match key {
                Some(Ok(Event::Key(key))) if key.kind != KeyEventKind::Release => match model.key(key) {
                    KeyEffect::Quit => return Ok(()),
                    KeyEffect::Open => true,
                    KeyEffect::Stay => false,
                    KeyEffect::Kill(place) => {
                        if let Some(kills) = &kills {
                            (kills.kill)(place, reports.clone());
                        }
                        false
                    }
                },
                // A new size takes effect with the next drawing.
                Some(Ok(_)) => false,
                // The terminal is gone.
                Some(Err(_)) | None => return Ok(()),
            },
            changed = view.changed() => {
                if changed.is_err() {
                    return Ok(());
                }
                model.show(&view.borrow_and_update(), now_ns());
                false
            }
            _ = tick.tick() => {
                model.show(&view.borrow(), now_ns());
                true
            }
            Some((source, content)) = content.recv() => {
                busy = false;
                // The content of a closed panel: the open panel may still wait for its content.
                !model.fill(&source, &content)
            }
            Some(report) = report.recv() => {
                model.notice = Some(report);
                false
            }
        };
        let wanted = model.wanted();
        let pod = wanted.as_ref().and_then(|source| view.borrow().pods.get(&source.uid).cloned());
        if let (true, false, Some(source), Some(pod)) = (open, busy, wanted, pod) {
            let (places, contents) = (places.clone(), contents.clone());
            busy = true;
            task::spawn("panel", async move {
                let content = fetch(&source, &places, &pod).await;
                // The receiver is dropped with the screen; that is not an error.
                let _ = contents.send((source, Arc::new(content))).await;
            });
        }
    }
}

/// Restores the terminal when dropped.
pub(crate) struct Restored;

impl Drop for Restored {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

async fn fetch(source: &PanelSource, places: &Places, pod: &PodView) -> Content {
    let mut title = String::new();
    let text = match source.kind {
        Kind::Explain => explain::fetch(&places.paths, &pod.uid).await.map(|r| explain::render(&r, now_ns())),
        Kind::Trace => trace::fetch(&places.paths, &pod.uid).await.map(|found| {
            let mut operations = trace::operations(found.spans, &found.uid);
            operations.retain(trace::Operation::changed_something);
            operations.truncate(OPERATIONS);
            trace::render(&operations, &found.name, &found.missing, false)
        }),
        Kind::Logs => {
            let names = logs::containers(pod);
            let container = names.get(source.container % names.len().max(1)).cloned();
            title = match (&container, names.len()) {
                (None, _) => String::new(),
                (Some(name), 1) => format!(" {name}"),
                (Some(name), n) => format!(" {name}  ({} of {n}, c: next)", source.container % n + 1),
            };
            let container = container.as_deref();
            logs::tail(&places.pod_logs_dir, pod, container, LOG_LINES)
                .map(|text| if text.is_empty() { "no output yet\n".to_owned() } else { text })
        }
    };
    Content { title, text: text.unwrap_or_else(|error| quintlet_kit::error_chain(&error)) }
}

/// Returns the header of `quintctl pods --watch`.
#[must_use]
pub(crate) fn plain_header(run_dir: &Path) -> Vec<String> {
    vec![clean(&format!("quintlet {}  sockets in {}", env!("CARGO_PKG_VERSION"), run_dir.display()))]
}
