//! Compares the state of pods with the expectations in their manifests (`quintlet.dev/expect`). Only
//! [`read_dir`] does I/O.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use quintlet_proto::podsync::v1::PodView;
use serde_json::Value;
use tokio::time::Instant;

use crate::view::View;

/// The annotation. A file that is not a valid manifest has a comment instead:
/// `# quintlet.dev/expect: InvalidManifest`.
const ANNOTATION: &str = "quintlet.dev/expect";

/// The expectation for an invalid manifest.
const INVALID: &str = "InvalidManifest";

/// Time for which a pod must have the expected state. A pod that will fail or complete may be Ready for a
/// moment.
const HOLD_TIME: Duration = Duration::from_secs(3);

/// Time after which a pod with another state has settled, if its state has not changed.
const SETTLE_TIME: Duration = Duration::from_secs(15);

/// The expectation of one manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Expectation {
    file: String,
    /// Namespace and name; none for an expectation in a comment.
    pod: Option<(String, String)>,
    expect: String,
}

impl Expectation {
    fn title(&self) -> &str {
        self.pod.as_ref().map_or(self.file.as_str(), |(_, name)| name)
    }

    /// Returns the actual state: `Ready`, the status as kubectl prints it, `InvalidManifest`, or `absent`.
    fn actual(&self, view: &View, node: &str) -> String {
        let invalid = view
            .problems
            .iter()
            .any(|p| Path::new(&p.origin).file_name().is_some_and(|name| name == self.file.as_str()));
        let pod = self.pod.as_ref().and_then(|(namespace, name)| {
            let full = format!("{name}-{node}");
            view.pods.values().find(|p| p.namespace == *namespace && (p.name == *name || p.name == full))
        });
        match pod {
            _ if invalid && self.expect == INVALID => INVALID.to_owned(),
            Some(pod) if is_ready(pod) => "Ready".to_owned(),
            Some(pod) => pod.status.clone(),
            None if invalid => INVALID.to_owned(),
            None => "absent".to_owned(),
        }
    }
}

fn is_ready(pod: &PodView) -> bool {
    pod.status == "Running"
        && pod.ready.split_once('/').is_some_and(|(ready, all)| ready == all && all != "0")
}

/// Reads the expectations of all manifests in a directory, sorted by file name.
pub(super) fn read_dir(dir: &Path) -> std::io::Result<Vec<Expectation>> {
    let mut files: Vec<_> = std::fs::read_dir(dir)?.collect::<Result<Vec<_>, _>>()?;
    files.sort_by_key(std::fs::DirEntry::file_name);
    let mut all = Vec::new();
    for file in files {
        let name = file.file_name().to_string_lossy().into_owned();
        // Pod-sync ignores hidden files too.
        if !name.starts_with('.') && file.path().is_file() {
            all.extend(read(&name, &String::from_utf8_lossy(&std::fs::read(file.path())?)));
        }
    }
    Ok(all)
}

fn read(file: &str, text: &str) -> Vec<Expectation> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).unwrap_or_default();
    let mut found: Vec<Expectation> = documents
        .iter()
        .filter_map(|document| {
            let metadata = document.get("metadata")?;
            let text = |value: Option<&Value>| value.and_then(Value::as_str).map(str::to_owned);
            let expect = text(metadata.get("annotations")?.get(ANNOTATION))?;
            let namespace = text(metadata.get("namespace")).unwrap_or_else(|| "default".to_owned());
            let pod = text(metadata.get("name")).map(|name| (namespace, name));
            Some(Expectation { file: file.to_owned(), pod, expect })
        })
        .collect();
    if found.is_empty() {
        let mark = format!("{ANNOTATION}:");
        found.extend(
            text.lines().filter_map(|l| l.trim().strip_prefix('#')?.trim().strip_prefix(&mark)).map(
                |expect| Expectation { file: file.to_owned(), pod: None, expect: expect.trim().to_owned() },
            ),
        );
    }
    found
}

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Comparison {
    /// Some pods have not settled.
    Pending,
    /// All pods have the expected state.
    Same,
    /// All pods have settled, and some have another state: one line each.
    Different(Vec<String>),
}

/// Checks the expectations repeatedly, and tracks for how long each state lasts.
#[derive(Debug)]
pub(super) struct ExpectationChecker {
    expectations: Vec<Expectation>,
    node: String,
    /// Last state and the time of its first check, by index of the expectation.
    last: BTreeMap<usize, (String, Instant)>,
}

impl ExpectationChecker {
    pub(super) fn new(expectations: Vec<Expectation>, node: &str) -> Self {
        Self { expectations, node: node.to_owned(), last: BTreeMap::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.expectations.len()
    }

    /// Compares the expectations with the view at `now`.
    pub(super) fn check(&mut self, view: &View, now: Instant) -> Comparison {
        if !view.complete {
            return Comparison::Pending;
        }
        let (mut same, mut settled) = (true, true);
        for (index, expectation) in self.expectations.iter().enumerate() {
            let actual = expectation.actual(view, &self.node);
            let (status, since) = self.last.entry(index).or_insert_with(|| (actual.clone(), now));
            if *status != actual {
                (*status, *since) = (actual, now);
            }
            let as_expected = *status == expectation.expect;
            same &= as_expected;
            settled &= now.duration_since(*since) >= if as_expected { HOLD_TIME } else { SETTLE_TIME };
        }
        match (settled, same) {
            (true, true) => Comparison::Same,
            (true, false) => Comparison::Different(self.differences()),
            (false, _) => Comparison::Pending,
        }
    }

    /// Returns the differences at the last check, one line each.
    pub(super) fn differences(&self) -> Vec<String> {
        self.expectations
            .iter()
            .enumerate()
            .filter_map(|(index, wanted)| {
                let actual = self.last.get(&index).map_or("unknown", |(status, _)| status);
                (actual != wanted.expect).then(|| {
                    format!("{}: expected {}, is {actual} ({})", wanted.title(), wanted.expect, wanted.file)
                })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use quintlet_proto::podsync::v1::SourceProblem;

    use super::*;

    const WEB: &str = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n---\napiVersion: v1\nkind: Pod\n\
                       metadata:\n  name: web\n  annotations: {quintlet.dev/expect: Ready}\n";

    fn view(pods: &[(&str, &str, &str)], broken: &[&str]) -> View {
        let pods = pods.iter().map(|(name, ready, status)| PodView {
            uid: (*name).to_owned(),
            name: (*name).to_owned(),
            namespace: "default".to_owned(),
            ready: (*ready).to_owned(),
            status: (*status).to_owned(),
            ..PodView::default()
        });
        let problem =
            |file: &&str| SourceProblem { origin: format!("/m/{file}"), ..SourceProblem::default() };
        View {
            pods: pods.map(|p| (p.uid.clone(), p)).collect(),
            problems: broken.iter().map(problem).collect(),
            complete: true,
        }
    }

    #[test]
    fn expectations_are_found_in_annotations_and_where_there_are_none_in_comments() {
        let found = read("web.yaml", WEB);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].title(), found[0].expect.as_str()), ("web", "Ready"));
        let found = read("bad.yaml", "# quintlet.dev/expect: InvalidManifest\n{ not yaml\n");
        assert_eq!((found[0].title(), found[0].expect.as_str()), ("bad.yaml", INVALID));
        assert!(read("plain.yaml", "kind: Pod\nmetadata: {name: x}\n").is_empty());
    }

    #[test]
    fn states_are_compared_with_their_expectations() {
        type Case<'a> = (&'a str, &'a [(&'a str, &'a str, &'a str)], &'a [&'a str], bool);
        let cases: [Case<'_>; 9] = [
            ("Ready", &[("web", "1/1", "Running")], &[], true),
            ("Ready", &[("web-node", "2/2", "Running")], &[], true),
            ("Ready", &[("web", "1/2", "Running")], &[], false),
            ("Completed", &[("web", "0/1", "Completed")], &[], true),
            ("CrashLoopBackOff", &[("web", "0/1", "CrashLoopBackOff")], &[], true),
            ("CrashLoopBackOff", &[("web", "1/1", "Running")], &[], false),
            ("InvalidManifest", &[], &["web.yaml"], true),
            ("InvalidManifest", &[], &["other.yaml"], false),
            ("Ready", &[], &["web.yaml"], false),
        ];
        for (expect, pods, broken, same) in cases {
            let wanted = read("web.yaml", &WEB.replace("Ready", expect));
            let mut checker = ExpectationChecker::new(wanted, "node");
            let seen = view(pods, broken);
            let start = Instant::now();
            assert_eq!(checker.check(&seen, start), Comparison::Pending);
            let verdict = checker.check(&seen, start + HOLD_TIME);
            assert_eq!(verdict == Comparison::Same, same, "{expect} {pods:?} {broken:?}");
        }
    }

    #[test]
    fn a_pod_that_is_briefly_ready_does_not_count_as_ready() {
        let mut checker = ExpectationChecker::new(read("web.yaml", WEB), "node");
        let start = Instant::now();
        let (ready, failed) =
            (view(&[("web", "1/1", "Running")], &[]), view(&[("web", "0/1", "Error")], &[]));
        assert_eq!(checker.check(&ready, start), Comparison::Pending);
        assert_eq!(checker.check(&failed, start + HOLD_TIME / 2), Comparison::Pending);
        assert_eq!(checker.check(&ready, start + HOLD_TIME), Comparison::Pending);
        assert_eq!(checker.check(&ready, start + HOLD_TIME * 2), Comparison::Same);
    }

    #[test]
    fn a_wrong_expectation_is_reported_once_its_pod_stays_as_it_is() {
        let mut checker =
            ExpectationChecker::new(read("web.yaml", &WEB.replace("Ready", "Completed")), "node");
        let start = Instant::now();
        let seen = view(&[("web", "1/1", "Running")], &[]);
        assert_eq!(checker.check(&View::default(), start), Comparison::Pending);
        assert_eq!(checker.check(&seen, start), Comparison::Pending);
        assert_eq!(checker.check(&seen, start + SETTLE_TIME / 2), Comparison::Pending);
        let Comparison::Different(lines) = checker.check(&seen, start + SETTLE_TIME) else {
            panic!("not settled")
        };
        assert_eq!(lines, ["web: expected Completed, is Ready (web.yaml)"]);
    }
}
