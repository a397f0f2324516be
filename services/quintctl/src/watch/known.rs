//! The last state of each pod, from which changes are computed.

use std::collections::{BTreeMap, BTreeSet};

use quintctl_text::clean;
use quintlet_proto::podsync::v1::{PodView, SourceProblem};

use super::lines::Line;
use crate::pods::{INVALID_MANIFEST, Row};

/// Longest time, in nanoseconds, from a lifecycle event to the status that it causes, if all services work. A
/// later status has another cause.
const FOLLOWS_WITHIN: i64 = 10_000_000_000;

#[derive(Debug, Default)]
struct Pod {
    name: String,
    text: String,
    resource_version: String,
    /// When the status was printed, until the API server has it.
    printed_at: Option<i64>,
}

/// The last state of each pod.
#[derive(Debug, Default)]
pub(crate) struct Known {
    pods: BTreeMap<String, Pod>,
    problems: BTreeSet<String>,
    seen: Option<BTreeSet<String>>,
    changed: usize,
}

impl Known {
    /// Starts the snapshot of a new stream.
    pub(crate) fn begin(&mut self) {
        self.seen = Some(BTreeSet::new());
        self.changed = 0;
    }

    /// Records the state of a pod. Returns up to two lines: the status changed, and the API server has it.
    /// `event` is the time of the pod's newest lifecycle event, nanoseconds since 1970.
    pub(crate) fn pod(&mut self, pod: &PodView, now: i64, event: Option<i64>) -> Vec<Line> {
        let snapshot = self.seen.is_some();
        if let Some(seen) = &mut self.seen {
            seen.insert(pod.uid.clone());
        }
        let row = Row::of_pod(pod, now);
        // Times that change with the clock would make each update a change.
        let wait =
            pod.waiting.as_ref().map(|w| clean(if w.message.is_empty() { &w.reason } else { &w.message }));
        let mut text = format!("{} {}", row.ready, row.status);
        match pod.restarts {
            0 => {}
            1 => text.push_str(", 1 restart"),
            n => text.push_str(&format!(", {n} restarts")),
        }
        if let Some(wait) = wait.filter(|w| !w.is_empty()) {
            text.push_str(&format!("  {wait}"));
        }
        let line = Line {
            at: now,
            source: "status",
            subject: row.name.clone(),
            uid: pod.uid.clone(),
            ..Line::default()
        };
        let mut out = Vec::new();
        let known = self.pods.entry(pod.uid.clone()).or_default();
        known.name = row.name;
        if known.text != text {
            known.text.clone_from(&text);
            known.printed_at = Some(now);
            self.changed += 1;
            let after = event.map(|at| now - at).filter(|ns| !snapshot && (0..FOLLOWS_WITHIN).contains(ns));
            out.push(Line { text, place: format!("v {}", pod.version), after, ..line.clone() });
        }
        if known.resource_version != pod.resource_version {
            known.resource_version.clone_from(&pod.resource_version);
            let after = known.printed_at.take().map(|at| now - at).filter(|ns| !snapshot && *ns > 0);
            if !snapshot && !pod.resource_version.is_empty() {
                let place = format!("rv {}", clean(&pod.resource_version));
                out.push(Line { source: "api", text: "status written".to_owned(), place, after, ..line });
            }
        }
        out
    }

    /// Records that a pod was removed.
    pub(crate) fn removed(&mut self, uid: &str, now: i64) -> Option<Line> {
        let pod = self.pods.remove(uid)?;
        Some(Line {
            at: now,
            source: "status",
            subject: pod.name,
            text: "gone".to_owned(),
            uid: uid.to_owned(),
            ..Line::default()
        })
    }

    /// Ends the snapshot. Returns the lines of pods that are not in it, and the number of pods that changed
    /// since the previous stream.
    pub(crate) fn end(&mut self, now: i64) -> (Vec<Line>, usize) {
        let Some(seen) = self.seen.take() else { return (Vec::new(), 0) };
        let gone: Vec<String> = self.pods.keys().filter(|uid| !seen.contains(*uid)).cloned().collect();
        let lines: Vec<Line> = gone.iter().filter_map(|uid| self.removed(uid, now)).collect();
        let changed = self.changed + lines.len();
        (lines, changed)
    }

    /// Records the invalid manifests. Returns the lines of new ones.
    pub(crate) fn problems(&mut self, problems: &[SourceProblem], now: i64) -> Vec<Line> {
        let mut current = BTreeSet::new();
        let mut out = Vec::new();
        for problem in problems {
            let row = Row::of_problem(problem, now);
            let text = format!("{INVALID_MANIFEST}  {}", row.waiting);
            if !self.problems.contains(&format!("{} {text}", row.name)) {
                out.push(Line {
                    at: now,
                    source: "status",
                    subject: row.name.clone(),
                    text: text.clone(),
                    ..Line::default()
                });
            }
            current.insert(format!("{} {text}", row.name));
        }
        self.problems = current;
        out
    }
}
