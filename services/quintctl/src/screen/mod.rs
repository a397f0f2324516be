//! The live table of the pods, with a panel for one of them.
//!
//! The model decides what is seen and what a key does, without a terminal. The loop has the terminal: it draws after each
//! key, change and second, and gives the terminal back however it ends, a panic included. A task per look at a panel's
//! content; what it brings is dropped when the panel was closed meanwhile. A service that is killed at a key is watched by
//! a task of the supervisor, which sends what it saw.

mod model;

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crossterm::event::{Event, EventStream, KeyEventKind};
use futures::StreamExt as _;
use quintlet_kit::paths::Paths;
use quintlet_kit::task;
use quintlet_proto::podsync::v1::PodView;
use tokio::sync::{mpsc, watch};

use crate::error::Error;
use crate::text::{clean, now_ns};
use crate::up::view::View;
use crate::{explain, logs, trace};
use model::{Kind, Model, Of, Step};

/// Ages and open panels are brought up to date this often.
const TICK: Duration = Duration::from_secs(1);

/// Lines of a log in its panel.
const LOG_LINES: usize = 500;

/// Operations in the trace panel.
const OPERATIONS: usize = 5;

/// Reports on the way to the screen: one killed service at a time says two things.
const REPORTS: usize = 4;

/// Where the content of panels comes from.
#[derive(Debug, Clone)]
pub struct Places {
    /// The services' sockets.
    pub paths: Paths,
    /// The containers' logs.
    pub pod_logs_dir: PathBuf,
}

/// Services that a key kills.
pub(crate) struct Kills {
    /// Their names, in the order of the digits that choose them.
    pub(crate) names: Vec<&'static str>,
    /// Kills one of them by its place, and reports in words.
    pub(crate) kill: Box<dyn Fn(usize, mpsc::Sender<String>) + Send + Sync>,
}

/// Whether there is a terminal to show a live table on.
#[must_use]
pub fn is_possible() -> bool {
    let dumb = std::env::var_os("TERM").is_none_or(|t| t.is_empty() || t == "dumb");
    !dumb && std::io::stdout().is_terminal() && std::io::stdin().is_terminal()
}

/// Shows the pods of `socket`'s pod-sync until the user quits. `header` gets the width there is.
///
/// # Errors
/// The terminal cannot be used.
pub async fn follow(places: Places, header: impl Fn(usize) -> Vec<String>) -> Result<(), Error> {
    let (views, view) = watch::channel(View::default());
    let follower = task::spawn("follow pods", crate::up::view::follow(places.paths.podsync(), views));
    let done = run(places, view, header, None).await;
    follower.abort();
    done
}

/// Shows the pods of `view` below the lines of `header`, until the user quits. Dropping it gives the terminal back.
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
    // One look is under way at a time.
    let (contents, mut content) = mpsc::channel::<(Of, Arc<Content>)>(1);
    let (reports, mut report) = mpsc::channel::<String>(REPORTS);
    let mut busy = false;
    let mut model = Model::new(kills.as_ref().map(|k| k.names.clone()).unwrap_or_default());
    model.show(&view.borrow_and_update(), now_ns());
    loop {
        let width = terminal.size().map_err(Error::os("ask the terminal for its size"))?.width;
        model.header = header(usize::from(width));
        terminal.draw(|frame| model.draw(frame)).map_err(Error::os("draw on the terminal"))?;
        // All of them only wait and lose nothing when dropped.
        let open = tokio::select! {
            key = keys.next() => match key {
                Some(Ok(Event::Key(key))) if key.kind != KeyEventKind::Release => match model.key(key) {
                    Step::Quit => return Ok(()),
                    Step::Open => true,
                    Step::Stay => false,
                    Step::Kill(place) => {
                        if let Some(kills) = &kills {
                            (kills.kill)(place, reports.clone());
                        }
                        false
                    }
                },
                // A new size is drawn on the next turn.
                Some(Ok(_)) => false,
                // The terminal went away.
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
            Some((of, content)) = content.recv() => {
                busy = false;
                // Of a panel that was closed: the one that is open now may wait for its own.
                !model.fill(&of, &content)
            }
            Some(report) = report.recv() => {
                model.notice = Some(report);
                false
            }
        };
        let wanted = model.wanted();
        let pod = wanted.as_ref().and_then(|of| view.borrow().pods.get(&of.uid).cloned());
        if let (true, false, Some(of), Some(pod)) = (open, busy, wanted, pod) {
            let (places, contents) = (places.clone(), contents.clone());
            busy = true;
            task::spawn("panel", async move {
                let content = look_at(&of, &places, &pod).await;
                // A screen that ended reads nothing.
                let _ = contents.send((of, Arc::new(content))).await;
            });
        }
    }
}

/// Gives the terminal back when dropped.
pub(crate) struct Restored;

impl Drop for Restored {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// What a panel shows.
#[derive(Debug, Default)]
struct Content {
    /// Behind the pod's name in the title.
    title: String,
    text: String,
}

async fn look_at(of: &Of, places: &Places, pod: &PodView) -> Content {
    let mut title = String::new();
    let text = match of.kind {
        Kind::Explain => explain::fetch(&places.paths, &pod.uid).await.map(|r| explain::render(&r, now_ns())),
        Kind::Trace => trace::fetch(&places.paths, &pod.uid).await.map(|found| {
            let mut operations = trace::operations(found.spans, &found.uid);
            operations.retain(trace::Operation::changed_something);
            operations.truncate(OPERATIONS);
            trace::render(&operations, &found.name, &found.missing, false)
        }),
        Kind::Logs => {
            let names = logs::containers(pod);
            let container = names.get(of.container % names.len().max(1)).cloned();
            title = match (&container, names.len()) {
                (None, _) => String::new(),
                (Some(name), 1) => format!(" {name}"),
                (Some(name), n) => format!(" {name}  ({} of {n}, c: next)", of.container % n + 1),
            };
            let container = container.as_deref();
            logs::tail(&places.pod_logs_dir, pod, container, LOG_LINES)
                .map(|text| if text.is_empty() { "nothing written yet\n".to_owned() } else { text })
        }
    };
    Content { title, text: text.unwrap_or_else(|error| quintlet_kit::error_chain(&error)) }
}

/// The header of a screen that supervises nothing.
#[must_use]
pub fn plain_header(run_dir: &Path) -> Vec<String> {
    vec![clean(&format!("quintlet {}  sockets in {}", env!("CARGO_PKG_VERSION"), run_dir.display()))]
}
