//! The live table of the pods, with a panel for one of them.
//!
//! The model decides what is seen and what a key does, without a terminal. The loop has the terminal: it draws after each
//! key, change and second, and gives the terminal back however it ends, a panic included. A task per look at a panel's
//! content; what it brings is dropped when the panel was closed meanwhile.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crossterm::event::{Event, EventStream, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use futures::StreamExt as _;
use quintlet_kit::paths::Paths;
use quintlet_kit::task;
use quintlet_proto::podsync::v1::PodView;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::Paragraph;
use tokio::sync::{mpsc, watch};

use crate::error::Error;
use crate::pods::{INVALID_MANIFEST, Row, rows, sort};
use crate::text::{clean, fit, now_ns, table};
use crate::up::view::View;
use crate::{explain, logs, trace};

/// Ages and open panels are brought up to date this often.
const TICK: Duration = Duration::from_secs(1);

/// Lines of a log in its panel.
const LOG_LINES: usize = 500;

/// Operations in the trace panel.
const OPERATIONS: usize = 5;

/// Where the content of panels comes from.
#[derive(Debug, Clone)]
pub struct Places {
    /// The services' sockets.
    pub paths: Paths,
    /// The containers' logs.
    pub pod_logs_dir: PathBuf,
}

/// Whether there is a terminal to show a live table on.
#[must_use]
pub fn is_possible() -> bool {
    let dumb = std::env::var_os("TERM").is_none_or(|t| t.is_empty() || t == "dumb");
    !dumb && std::io::stdout().is_terminal() && std::io::stdin().is_terminal()
}

/// Shows the pods of `socket`'s pod-sync until the user quits.
///
/// # Errors
/// The terminal cannot be used.
pub async fn follow(places: Places, header: impl Fn() -> Vec<String>) -> Result<(), Error> {
    let (views, view) = watch::channel(View::default());
    let follower = task::spawn("follow pods", crate::up::view::follow(places.paths.podsync(), views));
    let done = run(places, view, header).await;
    follower.abort();
    done
}

/// Shows the pods of `view` below the lines of `header`, until the user quits. Dropping it gives the terminal back.
pub(crate) async fn run(
    places: Places,
    mut view: watch::Receiver<View>,
    header: impl Fn() -> Vec<String>,
) -> Result<(), Error> {
    let mut terminal = ratatui::try_init().map_err(Error::os("use the terminal"))?;
    let _restored = Restored;
    let mut keys = EventStream::new();
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // One look is under way at a time.
    let (contents, mut content) = mpsc::channel::<(Of, String)>(1);
    let mut busy = false;
    let mut model = Model::default();
    model.show(&view.borrow_and_update(), now_ns());
    loop {
        model.header = header();
        terminal.draw(|frame| model.draw(frame)).map_err(Error::os("draw on the terminal"))?;
        // All of them only wait and lose nothing when dropped.
        let open = tokio::select! {
            key = keys.next() => match key {
                Some(Ok(Event::Key(key))) if key.kind != KeyEventKind::Release => match model.key(key) {
                    Step::Quit => return Ok(()),
                    Step::Open => true,
                    Step::Stay => false,
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
            Some((of, text)) = content.recv() => {
                busy = false;
                // Of a panel that was closed: the one that is open now may wait for its own.
                !model.fill(&of, &text)
            }
        };
        let wanted = model.panel.as_ref().map(|p| p.of.clone());
        let pod = wanted.as_ref().and_then(|of| view.borrow().pods.get(&of.uid).cloned());
        if let (true, false, Some(of), Some(pod)) = (open, busy, wanted, pod) {
            let (places, contents) = (places.clone(), contents.clone());
            busy = true;
            task::spawn("panel", async move {
                let text = look_at(of.kind, &places, &pod).await;
                // A screen that ended reads nothing.
                let _ = contents.send((of, text)).await;
            });
        }
    }
}

/// Gives the terminal back when dropped.
struct Restored;

impl Drop for Restored {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

async fn look_at(kind: Kind, places: &Places, pod: &PodView) -> String {
    let text = match kind {
        Kind::Explain => explain::fetch(&places.paths, &pod.uid).await.map(|r| explain::render(&r, now_ns())),
        Kind::Trace => trace::fetch(&places.paths, &pod.uid).await.map(|found| {
            let mut operations = trace::operations(found.spans, &found.uid);
            operations.retain(trace::Operation::did_something);
            operations.truncate(OPERATIONS);
            trace::render(&operations, &found.name, &found.missing, false)
        }),
        Kind::Logs => logs::tail(&places.pod_logs_dir, pod, LOG_LINES),
    };
    text.unwrap_or_else(|error| quintlet_kit::error_chain(&error))
}

/// What a panel shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Logs,
    Explain,
    Trace,
}

impl Kind {
    fn of_key(key: KeyCode) -> Option<Self> {
        match key {
            KeyCode::Char('l') => Some(Self::Logs),
            KeyCode::Char('e') | KeyCode::Enter => Some(Self::Explain),
            KeyCode::Char('t') => Some(Self::Trace),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Logs => "logs",
            Self::Explain => "explain",
            Self::Trace => "trace",
        }
    }
}

/// A panel's subject.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Of {
    kind: Kind,
    uid: String,
}

/// The view of one pod in place of the table.
#[derive(Debug)]
struct Panel {
    of: Of,
    title: String,
    lines: Vec<String>,
    /// First line seen; None: the last lines are seen, whatever comes.
    top: Option<usize>,
}

/// What follows from a key.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Stay,
    Quit,
    /// A panel was opened: its content is wanted.
    Open,
}

/// What is seen.
#[derive(Debug, Default)]
struct Model {
    header: Vec<String>,
    rows: Vec<Row>,
    complete: bool,
    selected: usize,
    panel: Option<Panel>,
    /// Lines below the header at the last drawing.
    height: usize,
}

impl Model {
    /// Takes the pods as they are; the selection stays with its pod.
    fn show(&mut self, view: &View, now: i64) {
        let selected = self.rows.get(self.selected).map(|r| (r.uid.clone(), r.name.clone()));
        let mut pods: Vec<PodView> = view.pods.values().cloned().collect();
        sort(&mut pods);
        self.rows = rows(&pods, &view.problems, now);
        self.complete = view.complete;
        let same =
            selected.and_then(|(uid, name)| self.rows.iter().position(|r| r.uid == uid && r.name == name));
        self.selected = same.unwrap_or(self.selected).min(self.rows.len().saturating_sub(1));
    }

    /// Takes the content of a panel; false if that is not open any more.
    fn fill(&mut self, of: &Of, text: &str) -> bool {
        let Some(panel) = self.panel.as_mut().filter(|p| p.of == *of) else { return false };
        panel.lines = text.lines().map(str::to_owned).collect();
        true
    }

    fn key(&mut self, key: KeyEvent) -> Step {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control && matches!(key.code, KeyCode::Char('c' | 'd')) {
            return Step::Quit;
        }
        let page = self.height.max(2) - 1;
        if let Some(panel) = &mut self.panel {
            let closes = Kind::of_key(key.code) == Some(panel.of.kind);
            if closes || matches!(key.code, KeyCode::Esc | KeyCode::Char('q') | KeyCode::Left) {
                self.panel = None;
                return Step::Stay;
            }
            let last = panel.lines.len().saturating_sub(self.height);
            let top = panel.top.unwrap_or(last);
            match key.code {
                KeyCode::Up | KeyCode::Char('k') => panel.top = Some(top.min(last).saturating_sub(1)),
                KeyCode::Down | KeyCode::Char('j') => panel.top = Some((top + 1).min(last)),
                KeyCode::PageUp => panel.top = Some(top.min(last).saturating_sub(page)),
                KeyCode::PageDown => panel.top = Some((top + page).min(last)),
                KeyCode::Home | KeyCode::Char('g') => panel.top = Some(0),
                KeyCode::End | KeyCode::Char('G') => panel.top = None,
                other => return Kind::of_key(other).map_or(Step::Stay, |kind| self.open(kind)),
            }
            return Step::Stay;
        }
        let last = self.rows.len().saturating_sub(1);
        match key.code {
            KeyCode::Char('q') => return Step::Quit,
            KeyCode::Up | KeyCode::Char('k') => self.selected = self.selected.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => self.selected = (self.selected + 1).min(last),
            KeyCode::PageUp => self.selected = self.selected.saturating_sub(page),
            KeyCode::PageDown => self.selected = (self.selected + page).min(last),
            KeyCode::Home | KeyCode::Char('g') => self.selected = 0,
            KeyCode::End | KeyCode::Char('G') => self.selected = last,
            other => return Kind::of_key(other).map_or(Step::Stay, |kind| self.open(kind)),
        }
        Step::Stay
    }

    fn open(&mut self, kind: Kind) -> Step {
        // A manifest that cannot be used has no more to show than its row.
        let Some(row) = self.rows.get(self.selected).filter(|r| !r.uid.is_empty()) else { return Step::Stay };
        self.panel = Some(Panel {
            of: Of { kind, uid: row.uid.clone() },
            title: format!("{} {}", kind.name(), row.name),
            lines: vec!["…".to_owned()],
            top: if kind == Kind::Logs { None } else { Some(0) },
        });
        Step::Open
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let header = u16::try_from(self.header.len()).unwrap_or(u16::MAX).min(frame.area().height / 2);
        let gap = u16::from(header > 0);
        let areas = Layout::vertical([
            Constraint::Length(header),
            Constraint::Length(gap),
            Constraint::Length(1),
            Constraint::Min(0),
            Constraint::Length(1),
        ]);
        let [top, _, title, body, foot] = areas.areas(frame.area());
        let width = usize::from(frame.area().width);
        let cut = |line: &str| Line::raw(fit(line, width));
        let dim = Style::new().add_modifier(Modifier::DIM);
        frame.render_widget(Paragraph::new(Text::from_iter(self.header.iter().map(|l| cut(l)))), top);
        self.height = usize::from(body.height);
        let (head, lines, keys) = match &self.panel {
            Some(panel) => {
                let last = panel.lines.len().saturating_sub(self.height);
                let first = panel.top.unwrap_or(last).min(last);
                let lines: Vec<Line<'_>> =
                    panel.lines.iter().skip(first).take(self.height).map(|l| cut(l)).collect();
                (panel.title.clone(), lines, "esc back   ↑↓ scroll   G end   l logs   e explain   t trace")
            }
            None => {
                let (head, lines) = self.table(width);
                (head, lines, "q quit   ↑↓ select   l logs   e explain   t trace")
            }
        };
        frame.render_widget(
            Paragraph::new(cut(&head)).style(Style::new().add_modifier(Modifier::BOLD)),
            title,
        );
        frame.render_widget(Paragraph::new(Text::from(lines)), body);
        frame.render_widget(Paragraph::new(cut(keys)).style(dim), foot);
    }

    /// The head of the table, and as many rows around the selected one as there is room for.
    fn table(&self, width: usize) -> (String, Vec<Line<'static>>) {
        if self.rows.is_empty() {
            let text = if self.complete { "no pods" } else { "waiting for pod-sync …" };
            return (text.to_owned(), Vec::new());
        }
        let cells: Vec<Vec<String>> =
            self.rows.iter().map(|r| r.cells().map(str::to_owned).to_vec()).collect();
        let text = table(&Row::HEADER, &cells);
        let mut lines = text.lines().map(str::to_owned);
        let head = lines.next().unwrap_or_default();
        let first = (self.selected + 1).saturating_sub(self.height.max(1));
        let lines =
            lines.zip(&self.rows).enumerate().skip(first).take(self.height).map(|(i, (line, row))| {
                let style = style(row);
                if i == self.selected {
                    let line = fit(&line, width);
                    return Line::styled(format!("{line:<width$}"), style.add_modifier(Modifier::REVERSED));
                }
                Line::styled(fit(&line, width), style)
            });
        (head, lines.collect())
    }
}

fn style(row: &Row) -> Style {
    let (ready, all) = row.ready.split_once('/').unwrap_or_default();
    match row.status.as_str() {
        INVALID_MANIFEST => Style::new().fg(Color::Red),
        "Completed" | "Succeeded" | "Terminating" => Style::new().add_modifier(Modifier::DIM),
        "Running" if ready == all => Style::new(),
        s if s.ends_with("BackOff") || s.contains("Err") || s == "OOMKilled" || s == "Failed" => {
            Style::new().fg(Color::Red)
        }
        _ => Style::new().fg(Color::Yellow),
    }
}

/// The header of a screen that supervises nothing.
#[must_use]
pub fn plain_header(run_dir: &Path) -> Vec<String> {
    vec![clean(&format!("quintlet {}  sockets in {}", env!("CARGO_PKG_VERSION"), run_dir.display()))]
}

#[cfg(test)]
mod tests {
    use quintlet_proto::podsync::v1::SourceProblem;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn view(names: &[&str]) -> View {
        let pod = |name: &&str| PodView {
            uid: format!("uid-{name}"),
            name: (*name).to_owned(),
            namespace: "default".to_owned(),
            ready: "1/1".to_owned(),
            status: "Running".to_owned(),
            created_unix_ns: 1,
            ..PodView::default()
        };
        let problem = SourceProblem {
            source: "file".into(),
            origin: "/m/broken.yaml".into(),
            message: "required".into(),
            ..SourceProblem::default()
        };
        View {
            pods: names.iter().map(|n| (format!("uid-{n}"), pod(n))).collect(),
            problems: vec![problem],
            complete: true,
        }
    }

    fn press(model: &mut Model, code: KeyCode) -> Step {
        model.key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    fn drawn(model: &mut Model, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|f| model.draw(f)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let lines = buffer.content().chunks(usize::from(width));
        lines
            .map(|l| {
                l.iter().map(ratatui::buffer::Cell::symbol).collect::<String>().trim_end().to_owned() + "\n"
            })
            .collect()
    }

    #[test]
    fn the_table_stands_between_the_header_and_the_keys() {
        let mut model = Model { header: vec!["quintlet 0.1.0".into()], ..Model::default() };
        model.show(&view(&["web", "once"]), 12_000_000_000);
        assert_eq!(
            drawn(&mut model, 64, 8),
            "\
quintlet 0.1.0

NAME         READY  STATUS           RESTARTS  IP  AGE  WAITING…
once         1/1    Running          0         –   11s
web          1/1    Running          0         –   11s
broken.yaml  –      InvalidManifest  –         –   12s  required

q quit   ↑↓ select   l logs   e explain   t trace
"
        );
    }

    #[test]
    fn no_size_is_too_small() {
        let mut model = Model { header: vec!["one".into(), "two".into()], ..Model::default() };
        model.show(&view(&["a", "b", "c"]), 0);
        for panel in [false, true] {
            if panel {
                press(&mut model, KeyCode::Char('e'));
            }
            for (width, height) in [(1, 1), (2, 3), (200, 2), (5, 60)] {
                drawn(&mut model, width, height);
            }
        }
    }

    #[test]
    fn the_selection_stays_with_its_pod_and_in_sight() {
        let mut model = Model::default();
        model.show(&view(&["b", "c"]), 0);
        press(&mut model, KeyCode::Down);
        assert_eq!(model.rows[model.selected].name, "c");
        model.show(&view(&["a", "b", "c", "d"]), 0);
        assert_eq!(model.rows[model.selected].name, "c");
        model.show(&view(&[]), 0);
        assert_eq!(model.selected, 0);
        model.show(&view(&["a", "b", "c", "d", "e"]), 0);
        press(&mut model, KeyCode::End);
        let seen = drawn(&mut model, 60, 4);
        assert!(seen.contains("broken.yaml") && !seen.contains("\na "), "{seen}");
    }

    #[test]
    fn panels_open_on_pods_alone_close_again_and_take_only_their_own_content() {
        let mut model = Model::default();
        model.show(&view(&["web"]), 0);
        assert_eq!(press(&mut model, KeyCode::Char('l')), Step::Open);
        let of = model.panel.as_ref().unwrap().of.clone();
        assert_eq!(press(&mut model, KeyCode::Char('t')), Step::Open);
        assert!(!model.fill(&of, "of the log"));
        assert_eq!(model.panel.as_ref().unwrap().lines, ["…"]);
        assert_eq!(press(&mut model, KeyCode::Char('q')), Step::Stay);
        assert!(model.panel.is_none());
        press(&mut model, KeyCode::Down);
        assert_eq!(press(&mut model, KeyCode::Char('e')), Step::Stay);
        assert!(model.panel.is_none());
        assert_eq!(press(&mut model, KeyCode::Char('q')), Step::Quit);
        assert_eq!(model.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), Step::Quit);
    }

    #[test]
    fn a_log_shows_its_end_until_scrolled() {
        let mut model = Model::default();
        model.show(&view(&["web"]), 0);
        press(&mut model, KeyCode::Char('l'));
        let of = model.panel.as_ref().unwrap().of.clone();
        let text: String = (1..=9).map(|n| format!("line {n}\n")).collect();
        assert!(model.fill(&of, &text));
        let seen = drawn(&mut model, 40, 5);
        assert!(seen.starts_with("logs web\nline 7\nline 8\nline 9\n"), "{seen}");
        press(&mut model, KeyCode::Up);
        assert!(drawn(&mut model, 40, 5).contains("line 6\nline 7\nline 8\n"));
        press(&mut model, KeyCode::End);
        assert!(drawn(&mut model, 40, 5).contains("line 9"));
    }
}
