//! A line per change, for where no live table can be shown.

use std::collections::BTreeMap;
use std::io::Write;

use quintlet_proto::podsync::v1::PodView;

use super::view::View;

/// Remembers what was printed last.
#[derive(Debug, Default)]
pub(super) struct Lines {
    pods: BTreeMap<String, String>,
    problems: Vec<String>,
}

impl Lines {
    /// What changed since the last call.
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
            let there = view.pods.contains_key(uid);
            if !there {
                out.push(format!("{} gone", text.split_whitespace().next().unwrap_or_default()));
            }
            there
        });
        let problems: Vec<String> = view
            .problems
            .iter()
            .map(|p| {
                let file = std::path::Path::new(&p.origin)
                    .file_name()
                    .map_or_else(|| p.origin.clone(), |n| n.to_string_lossy().into_owned());
                let field = if p.field.is_empty() { String::new() } else { format!("{}: ", p.field) };
                format!("{file:<24} –      InvalidManifest    {field}{}", p.message)
            })
            .collect();
        out.extend(problems.iter().filter(|p| !self.problems.contains(p)).cloned());
        self.problems = problems;
        out
    }
}

fn line(pod: &PodView) -> String {
    let waiting = pod.waiting.as_ref().map_or_else(String::new, |w| {
        if w.message.is_empty() { w.reason.clone() } else { w.message.clone() }
    });
    let ip = if pod.pod_ip.is_empty() { "–" } else { &pod.pod_ip };
    let text = format!(
        "{:<24} {:<6} {:<18} {:<3} {ip:<12} {waiting}",
        pod.name, pod.ready, pod.status, pod.restarts
    );
    text.trim_end().to_owned()
}

/// Prints lines; a closed standard output is no reason to stop supervising.
pub(super) fn print(lines: &[String]) {
    let mut out = std::io::stdout().lock();
    for line in lines {
        let _ = writeln!(out, "{line}");
    }
    let _ = out.flush();
}

/// Prints without ending the line.
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
        view.pods.clear();
        assert_eq!(lines.changes(&view), ["web gone"]);
    }
}
