//! The state of the screen, the effect of keys, and the drawing.

use std::path::Path;

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use quintctl_text::{clean, fit, table, wrap};
use quintlet_proto::podsync::v1::PodView;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::Paragraph;

use crate::pods::{INVALID_MANIFEST, Row, rows, sort};
use crate::view::View;

/// Height in lines below which only the last line of the header is shown, which has the state of the
/// services.
const LOW: u16 = 14;

/// Minimum width of the last column, in characters. Dispensable columns are left out to make room for it.
const WAITING_ROOM: usize = 30;

/// Indexes in [`Row::HEADER`] of columns that can be left out, most dispensable first: IP, age, restarts.
const DISPENSABLE: [usize; 3] = [4, 5, 3];

/// Indent of the continuation lines of an explanation, in characters.
const INDENT: usize = 13;

/// The content type of a panel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
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

/// The content of a panel.
#[derive(Debug, Default)]
pub(super) struct Content {
    /// Follows the pod's name in the title.
    pub(super) title: String,
    pub(super) text: String,
}

/// A panel's subject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PanelSource {
    pub(super) kind: Kind,
    pub(super) uid: String,
    /// Number of presses of `c`, which select the container, modulo the number of containers.
    pub(super) container: usize,
}

/// The details of one pod, shown instead of the table.
#[derive(Debug)]
struct Panel {
    source: PanelSource,
    name: String,
    title: String,
    text: String,
    /// The text, wrapped at the width of the last drawing.
    lines: Vec<String>,
    /// Index of the first visible line. None follows the end of the text.
    top: Option<usize>,
}

impl Panel {
    fn lay_out(&mut self, width: usize) {
        let indent = if self.source.kind == Kind::Explain { INDENT } else { 2 };
        self.lines = match self.source.kind {
            // A wrapped waterfall would be unreadable.
            Kind::Trace => self.text.lines().map(|l| fit(l, width)).collect(),
            Kind::Logs | Kind::Explain => self.text.lines().flat_map(|l| wrap(l, width, indent)).collect(),
        };
    }
}

/// The effect of a key outside the model.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum KeyEffect {
    Stay,
    Quit,
    /// Fetch the content of the open panel.
    Open,
    /// Kill the service at this index.
    Kill(usize),
}

/// The state of the screen.
#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) header: Vec<String>,
    /// Text that replaces the key help until the next key.
    pub(super) notice: Option<String>,
    /// Names of the services that can be killed.
    services: Vec<&'static str>,
    /// The next key selects the service to kill.
    choosing: bool,
    rows: Vec<Row>,
    complete: bool,
    selected: usize,
    /// The user selected a row. Before that, the first row stays selected.
    chosen: bool,
    panel: Option<Panel>,
    /// Height and width of the table or panel at the last drawing.
    height: usize,
    width: usize,
}

impl Model {
    pub(super) fn new(services: Vec<&'static str>) -> Self {
        Self { services, ..Self::default() }
    }

    /// Updates the rows. The selection stays with its pod.
    pub(super) fn show(&mut self, view: &View, now: i64) {
        let selected =
            self.rows.get(self.selected).filter(|_| self.chosen).map(|r| (r.uid.clone(), r.name.clone()));
        let mut pods: Vec<PodView> = view.pods.values().cloned().collect();
        sort(&mut pods);
        self.rows = rows(&pods, &view.problems, now);
        self.complete = view.complete;
        let same =
            selected.and_then(|(uid, name)| self.rows.iter().position(|r| r.uid == uid && r.name == name));
        self.selected = same.unwrap_or(self.selected).min(self.rows.len().saturating_sub(1));
    }

    /// Returns the subject of the open panel.
    pub(super) fn wanted(&self) -> Option<PanelSource> {
        self.panel.as_ref().map(|p| p.source.clone())
    }

    /// Sets the content of the panel of `of`. Returns false if that panel is not open.
    pub(super) fn fill(&mut self, source: &PanelSource, content: &Content) -> bool {
        let Some(panel) = self.panel.as_mut().filter(|p| p.source == *source) else { return false };
        panel.text.clone_from(&content.text);
        panel.title = format!("{} {}{}", source.kind.name(), panel.name, content.title);
        panel.lay_out(self.width);
        true
    }

    pub(super) fn key(&mut self, key: KeyEvent) -> KeyEffect {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control && matches!(key.code, KeyCode::Char('c' | 'd')) {
            return KeyEffect::Quit;
        }
        self.notice = None;
        if std::mem::take(&mut self.choosing) {
            let digit = |c: char| c.to_digit(10).and_then(|d| usize::try_from(d).ok()?.checked_sub(1));
            return match key.code {
                KeyCode::Char(c) => digit(c)
                    .filter(|place| *place < self.services.len())
                    .map_or(KeyEffect::Stay, KeyEffect::Kill),
                _ => KeyEffect::Stay,
            };
        }
        let page = self.height.max(2) - 1;
        if let Some(panel) = &mut self.panel {
            let closes = Kind::of_key(key.code) == Some(panel.source.kind);
            if closes || matches!(key.code, KeyCode::Esc | KeyCode::Char('q') | KeyCode::Left) {
                self.panel = None;
                return KeyEffect::Stay;
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
                KeyCode::Char('c') if panel.source.kind == Kind::Logs => {
                    panel.source.container += 1;
                    panel.top = None;
                    return KeyEffect::Open;
                }
                other => return Kind::of_key(other).map_or(KeyEffect::Stay, |kind| self.open(kind)),
            }
            return KeyEffect::Stay;
        }
        let last = self.rows.len().saturating_sub(1);
        let selected = match key.code {
            KeyCode::Char('q') => return KeyEffect::Quit,
            KeyCode::Char('k') if !self.services.is_empty() => {
                self.choosing = true;
                return KeyEffect::Stay;
            }
            KeyCode::Up => self.selected.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => (self.selected + 1).min(last),
            KeyCode::PageUp => self.selected.saturating_sub(page),
            KeyCode::PageDown => (self.selected + page).min(last),
            KeyCode::Home | KeyCode::Char('g') => 0,
            KeyCode::End | KeyCode::Char('G') => last,
            other => return Kind::of_key(other).map_or(KeyEffect::Stay, |kind| self.open(kind)),
        };
        (self.selected, self.chosen) = (selected, true);
        KeyEffect::Stay
    }

    fn open(&mut self, kind: Kind) -> KeyEffect {
        let Some(row) = self.rows.get(self.selected) else { return KeyEffect::Stay };
        self.chosen = true;
        // An invalid manifest has no pod: its only panel is the explanation, which needs no fetch.
        let kind = if row.uid.is_empty() { Kind::Explain } else { kind };
        let mut panel = Panel {
            source: PanelSource { kind, uid: row.uid.clone(), container: 0 },
            name: row.name.clone(),
            title: format!("{} {}", kind.name(), row.name),
            text: if row.uid.is_empty() { invalid_manifest(row) } else { "…".to_owned() },
            lines: Vec::new(),
            top: if kind == Kind::Logs { None } else { Some(0) },
        };
        panel.lay_out(self.width);
        self.panel = Some(panel);
        if row.uid.is_empty() { KeyEffect::Stay } else { KeyEffect::Open }
    }

    pub(super) fn draw(&mut self, frame: &mut Frame<'_>) {
        let area = frame.area();
        let kept = if area.height < LOW { self.header.len().min(1) } else { self.header.len() };
        let shown = self.header.split_off(self.header.len() - kept);
        let header = u16::try_from(kept).unwrap_or(u16::MAX).min(area.height / 2);
        let gap = u16::from(header > 0 && area.height >= LOW);
        let areas = Layout::vertical([
            Constraint::Length(header),
            Constraint::Length(gap),
            Constraint::Length(1),
            Constraint::Min(0),
            Constraint::Length(1),
        ]);
        let [top, _, title, body, foot] = areas.areas(area);
        let width = usize::from(area.width);
        let cut = |line: &str| Line::raw(fit(line, width));
        frame.render_widget(Paragraph::new(Text::from_iter(shown.iter().map(|l| cut(l)))), top);
        self.height = usize::from(body.height);
        if std::mem::replace(&mut self.width, width) != width
            && let Some(panel) = &mut self.panel
        {
            panel.lay_out(width);
        }
        let (head, lines) = match &self.panel {
            Some(panel) => {
                let last = panel.lines.len().saturating_sub(self.height);
                let first = panel.top.unwrap_or(last).min(last);
                let lines: Vec<Line<'_>> =
                    panel.lines.iter().skip(first).take(self.height).map(|l| cut(l)).collect();
                (panel.title.clone(), lines)
            }
            None => self.table(width),
        };
        frame.render_widget(
            Paragraph::new(cut(&head)).style(Style::new().add_modifier(Modifier::BOLD)),
            title,
        );
        frame.render_widget(Paragraph::new(Text::from(lines)), body);
        let (text, style) = self.foot(width);
        frame.render_widget(Paragraph::new(cut(&text)).style(style), foot);
    }

    /// Returns the last line: the choice of a service to kill, a report, or the key help.
    fn foot(&self, width: usize) -> (String, Style) {
        let strong = Style::new().add_modifier(Modifier::BOLD);
        if self.choosing {
            let names: Vec<String> =
                self.services.iter().enumerate().map(|(i, name)| format!("{} {name}", i + 1)).collect();
            return (format!("kill -9 which service?  {}   esc cancel", names.join("  ")), strong);
        }
        if let Some(notice) = &self.notice {
            return (clean(notice), strong);
        }
        let (long, short) = match (&self.panel, self.services.is_empty()) {
            (Some(_), _) => {
                ("esc back   ↑↓ scroll   G end   l logs   e explain   t trace", "esc back  ↑↓  G end  l e t")
            }
            (None, true) => ("q quit   ↑↓ select   l logs   e explain   t trace", "q quit  ↑↓  l e t"),
            (None, false) => (
                "q quit   ↑↓ select   l logs   e explain   t trace   k kill a service and watch nothing happen",
                "q quit  ↑↓  l logs  e explain  t trace  k kill",
            ),
        };
        let text = if long.chars().count() <= width { long } else { short };
        (text.to_owned(), Style::new().add_modifier(Modifier::DIM))
    }

    /// Returns the header of the table, and the rows that fit on the screen, with the selected one among
    /// them.
    fn table(&self, width: usize) -> (String, Vec<Line<'static>>) {
        if self.rows.is_empty() {
            let text = if self.complete { "no pods" } else { "waiting for pod-sync …" };
            return (text.to_owned(), Vec::new());
        }
        let all: Vec<Vec<String>> = self.rows.iter().map(|r| r.cells().map(str::to_owned).to_vec()).collect();
        let columns = columns(&all, width);
        let pick = |row: &[String]| columns.iter().filter_map(|c| row.get(*c).cloned()).collect();
        let cells: Vec<Vec<String>> = all.iter().map(|row| pick(row)).collect();
        let header: Vec<&str> = columns.iter().filter_map(|c| Row::HEADER.get(*c).copied()).collect();
        let text = table(&header, &cells);
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

/// Returns the indexes of the columns that fit in `width` with enough room for the last one.
fn columns(cells: &[Vec<String>], width: usize) -> Vec<usize> {
    let mut kept: Vec<usize> = (0..Row::HEADER.len()).collect();
    let widest = |column: usize| {
        let cells = cells.iter().filter_map(|row| row.get(column)).map(|c| c.chars().count());
        let head = Row::HEADER.get(column).map_or(0, |h| h.chars().count());
        cells.max().unwrap_or(0).max(head)
    };
    let last = Row::HEADER.len() - 1;
    let needs = |kept: &[usize]| {
        kept.iter()
            .map(|c| if *c == last { widest(*c).min(WAITING_ROOM) } else { widest(*c) + 2 })
            .sum::<usize>()
    };
    for column in DISPENSABLE {
        if needs(&kept) <= width {
            break;
        }
        kept.retain(|c| *c != column);
    }
    kept
}

/// Returns the explanation of an invalid manifest.
fn invalid_manifest(row: &Row) -> String {
    let file = Path::new(&row.origin);
    format!(
        "manifest {}\n  problem    {}\n  since      {}\n  what now   correct the manifest; it is read again when it changes, and other pods are not affected\n",
        clean(&file.display().to_string()),
        row.waiting,
        row.age
    )
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

#[cfg(test)]
mod tests;
