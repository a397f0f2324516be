//! Prints a line per change of a pod, where no live table can be shown.

use std::collections::BTreeMap;
use std::io::Write;

use quintctl_text::clean;
use quintlet_proto::podsync::v1::PodView;

use crate::pods::Row;
use crate::view::View;

/// The lines that were printed last, by pod.
#[derive(Debug, Default)]
pub(super) struct Lines {
    pods: BTreeMap<String, String>,
    problems: Vec<String>,
}

impl Lines {
    /// Returns the lines of pods and problems that changed since the last call.
    pub(super) fn changes(&mut self, view: &View) -> Vec<String> {
        let mut out = Vec::new();
        for pod in view.pods.values() {
            let text = line(pod);
            if self.pods.get(&pod.uid) != Some(&text) {
                out.push(text.clone());
                self.pods.insert(pod.uid.clone(), text);
            }
        }
        self.pods.retain(|uid, text| {
            let exists = view.pods.contains_key(uid);
            if !exists {
                out.push(format!("{} gone", text.split_whitespace().next().unwrap_or_default()));
            }
            exists
        });
        let problems: Vec<String> = view
            .problems
            .iter()
            .map(|p| {
                let row = Row::of_problem(p, 0);
                format!("{:<24} {:<6} {:<18} {}", row.name, row.ready, row.status, row.waiting)
            })
            .collect();
        out.extend(problems.iter().filter(|p| !self.problems.contains(p)).cloned());
        self.problems = problems;
        out
    }
}

fn line(pod: &PodView) -> String {
    let row = Row::of_pod(pod, 0);
    // Times that change with the clock would make each update a change.
    let waiting = pod
        .waiting
        .as_ref()
        .map_or_else(String::new, |w| clean(if w.message.is_empty() { &w.reason } else { &w.message }));
    let text = format!(
        "{:<24} {:<6} {:<18} {:<3} {:<12} {waiting}",
        row.name, row.ready, row.status, pod.restarts, row.ip
    );
    text.trim_end().to_owned()
}

/// Prints lines. Errors are ignored, since supervision continues without standard output.
pub(super) fn print(lines: &[String]) {
    let mut out = std::io::stdout().lock();
    for line in lines {
        let _ = writeln!(out, "{line}");
    }
    let _ = out.flush();
}

/// Prints text without a newline.
pub(super) fn print_part(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = write!(out, "{text}");
    let _ = out.flush();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changes_are_printed() {
        let mut lines = Lines::default();
        let pod = |status: &str| PodView {
            uid: "u".into(),
            name: "web".into(),
            ready: "0/1".into(),
            status: status.into(),
            ..PodView::default()
        };
        let mut view = View::default();
        view.pods.insert("u".into(), pod("Pending"));
        assert_eq!(lines.changes(&view).len(), 1);
        assert!(lines.changes(&view).is_empty());
        view.pods.insert("u".into(), pod("Running"));
        assert!(lines.changes(&view)[0].contains("Running"));
        let mut hostile = pod("Running");
        hostile.status = "\u{1b}[2Jgone".into();
        view.pods.insert("u".into(), hostile);
        assert!(!lines.changes(&view)[0].contains('\u{1b}'));
        view.pods.clear();
        assert_eq!(lines.changes(&view), ["web gone"]);
    }
}
