//! Pods as the commands show them: rows of a table and data.

use quintlet_proto::podsync::v1::{ListPodsReply, PodView, SourceProblem, Waiting};
use serde::Serialize;

use quintctl_text::{NOTHING, age, clean, moment, or_nothing, table};

/// Status of an invalid manifest.
pub(crate) const INVALID_MANIFEST: &str = "InvalidManifest";

/// Sorts pods by namespace and name.
pub(crate) fn sort(pods: &mut [PodView]) {
    pods.sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
}

/// One row of the table: a pod or an invalid manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Row {
    /// Empty for an invalid manifest.
    pub(crate) uid: String,
    /// Display name of the pod, or name of the manifest file.
    pub(crate) name: String,
    /// Ready containers and all containers, such as `1/2`.
    pub(crate) ready: String,
    /// Status as kubectl prints it.
    pub(crate) status: String,
    /// Number of restarts and the age of the last one.
    pub(crate) restarts: String,
    pub(crate) ip: String,
    pub(crate) age: String,
    /// Reason for which the pod waits, or problem of the manifest.
    pub(crate) waiting: String,
    /// File or URL of an invalid manifest; empty for a pod.
    pub(crate) origin: String,
}

impl Row {
    pub(crate) const HEADER: [&str; 7] = ["NAME", "READY", "STATUS", "RESTARTS", "IP", "AGE", "WAITING FOR"];

    /// Formats a pod, with ages relative to `now` in nanoseconds since 1970.
    #[must_use]
    pub(crate) fn of_pod(pod: &PodView, now: i64) -> Self {
        let restarts = match (pod.restarts, pod.last_restart_unix_ns) {
            (0, _) => "0".to_owned(),
            (n, 0) => n.to_string(),
            (n, at) => format!("{n} ({} ago)", age(now - at)),
        };
        Self {
            uid: pod.uid.clone(),
            name: display_name(&pod.namespace, &pod.name),
            ready: clean(&pod.ready),
            status: clean(&pod.status),
            restarts,
            ip: or_nothing(&pod.pod_ip),
            age: if pod.created_unix_ns == 0 { NOTHING.to_owned() } else { age(now - pod.created_unix_ns) },
            waiting: pod.waiting.as_ref().map(|w| waiting(w, now)).unwrap_or_default(),
            origin: String::new(),
        }
    }

    /// Formats an invalid manifest or a failing source, with its age relative to `now` in nanoseconds since
    /// 1970.
    #[must_use]
    pub(crate) fn of_problem(problem: &SourceProblem, now: i64) -> Self {
        let name = if problem.source == "file" {
            let file = std::path::Path::new(&problem.origin).file_name();
            file.map_or_else(|| problem.origin.clone(), |n| n.to_string_lossy().into_owned())
        } else {
            problem.origin.clone()
        };
        let field = if problem.field.is_empty() { String::new() } else { format!("{}: ", problem.field) };
        let dash = || NOTHING.to_owned();
        Self {
            uid: String::new(),
            name: clean(&name),
            ready: dash(),
            status: INVALID_MANIFEST.to_owned(),
            restarts: dash(),
            ip: dash(),
            age: age(now - problem.since_unix_ns),
            waiting: clean(&format!("{field}{}", problem.message)),
            origin: problem.origin.clone(),
        }
    }

    /// Returns the cells in the order of [`Row::HEADER`].
    #[must_use]
    pub(crate) fn cells(&self) -> [&str; 7] {
        [&self.name, &self.ready, &self.status, &self.restarts, &self.ip, &self.age, &self.waiting]
    }
}

/// Returns the name of a pod, with its namespace unless that is `default`.
#[must_use]
pub(crate) fn display_name(namespace: &str, name: &str) -> String {
    match namespace {
        "" | "default" => clean(name),
        other => clean(&format!("{other}/{name}")),
    }
}

/// Formats what a pod waits for, with the remaining time at `now` in nanoseconds since 1970.
#[must_use]
pub(crate) fn waiting(w: &Waiting, now: i64) -> String {
    let text = clean(if w.message.is_empty() { &w.reason } else { &w.message });
    if w.until_unix_ns == 0 {
        return text;
    }
    let left = age(w.until_unix_ns - now);
    match text.strip_prefix("restart after ") {
        Some(rest) => format!("restart in {left} ({rest})"),
        None => format!("{text} (again in {left})"),
    }
}

/// Returns the rows of the pods, followed by the rows of the problems.
#[must_use]
pub(crate) fn rows<'a>(
    pods: impl IntoIterator<Item = &'a PodView>,
    problems: &[SourceProblem],
    now: i64,
) -> Vec<Row> {
    let pods = pods.into_iter().map(|p| Row::of_pod(p, now));
    pods.chain(problems.iter().map(|p| Row::of_problem(p, now))).collect()
}

/// Formats the table; `wide` adds source, worker and UID.
#[must_use]
pub(crate) fn render(reply: &ListPodsReply, now: i64, wide: bool) -> String {
    if reply.pods.is_empty() && reply.problems.is_empty() {
        return "no pods\n".to_owned();
    }
    let mut cells: Vec<Vec<String>> = rows(&reply.pods, &reply.problems, now)
        .iter()
        .map(|row| row.cells().map(str::to_owned).to_vec())
        .collect();
    let mut header = Row::HEADER.to_vec();
    if wide {
        let more = reply.pods.iter().map(|p| [&p.source, &p.worker, &p.uid].map(|t| or_nothing(t)));
        let problems =
            reply.problems.iter().map(|p| [or_nothing(&p.source), NOTHING.to_owned(), NOTHING.to_owned()]);
        for (row, more) in cells.iter_mut().zip(more.chain(problems)) {
            let last = row.pop().unwrap_or_default();
            row.extend(more);
            row.push(last);
        }
        header.pop();
        header.extend(["SOURCE", "WORKER", "UID", "WAITING FOR"]);
    }
    table(&header, &cells)
}

/// A pod in JSON and YAML output.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PodData {
    name: String,
    namespace: String,
    uid: String,
    source: String,
    worker: String,
    ready: String,
    status: String,
    restarts: u32,
    last_restart: Option<String>,
    #[serde(rename = "podIP")]
    pod_ip: String,
    created: Option<String>,
    waiting: Option<WaitingData>,
    version: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<serde_json::Value>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct WaitingData {
    reason: String,
    message: String,
    container: String,
    since: Option<String>,
    until: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ProblemData {
    source: String,
    origin: String,
    field: String,
    message: String,
    since: Option<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct PodsData {
    pods: Vec<PodData>,
    problems: Vec<ProblemData>,
}

/// Formats a time for JSON and YAML; 0 is no time.
pub(crate) fn time(unix_ns: i64) -> Option<String> {
    (unix_ns != 0).then(|| moment(unix_ns))
}

impl From<&PodView> for PodData {
    fn from(p: &PodView) -> Self {
        Self {
            name: p.name.clone(),
            namespace: p.namespace.clone(),
            uid: p.uid.clone(),
            source: p.source.clone(),
            worker: p.worker.clone(),
            ready: p.ready.clone(),
            status: p.status.clone(),
            restarts: p.restarts,
            last_restart: time(p.last_restart_unix_ns),
            pod_ip: p.pod_ip.clone(),
            created: time(p.created_unix_ns),
            waiting: p.waiting.as_ref().map(|w| WaitingData {
                reason: w.reason.clone(),
                message: w.message.clone(),
                container: w.container.clone(),
                since: time(w.since_unix_ns),
                until: time(w.until_unix_ns),
            }),
            version: p.version,
            pod: serde_json::from_slice(&p.pod).ok(),
        }
    }
}

pub(crate) fn data(reply: &ListPodsReply) -> PodsData {
    PodsData {
        pods: reply.pods.iter().map(PodData::from).collect(),
        problems: reply
            .problems
            .iter()
            .map(|p| ProblemData {
                source: p.source.clone(),
                origin: p.origin.clone(),
                field: p.field.clone(),
                message: p.message.clone(),
                since: time(p.since_unix_ns),
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: i64 = 1_000_000_000;
    const NOW: i64 = 1_800_000_000 * S;

    fn pod(name: &str, status: &str) -> PodView {
        PodView {
            uid: format!("uid-{name}"),
            name: name.to_owned(),
            namespace: "default".to_owned(),
            source: "file".to_owned(),
            worker: "sync".to_owned(),
            ready: "1/1".to_owned(),
            status: status.to_owned(),
            pod_ip: "10.77.0.4".to_owned(),
            created_unix_ns: NOW - 41 * S,
            ..PodView::default()
        }
    }

    fn crasher() -> PodView {
        PodView {
            ready: "0/1".to_owned(),
            restarts: 3,
            last_restart_unix_ns: NOW - 4 * S,
            waiting: Some(Waiting {
                reason: "CrashLoopBackOff".to_owned(),
                message: "restart after exit 3, back-off 40s".to_owned(),
                container: "main".to_owned(),
                since_unix_ns: NOW - 4 * S,
                until_unix_ns: NOW + 36 * S,
            }),
            ..pod("crasher", "CrashLoopBackOff")
        }
    }

    fn broken() -> SourceProblem {
        SourceProblem {
            source: "file".to_owned(),
            origin: "/etc/kubernetes/manifests/broken.yaml".to_owned(),
            field: "spec.containers[0].image".to_owned(),
            message: "required".to_owned(),
            since_unix_ns: NOW - 12 * S,
        }
    }

    #[test]
    fn the_table_has_the_state_and_the_wait_of_each_pod_and_manifest() {
        let elsewhere =
            PodView { namespace: "kube-system".to_owned(), pod_ip: String::new(), ..pod("dns", "Pending") };
        let reply = ListPodsReply {
            pods: vec![crasher(), pod("web", "Running"), elsewhere],
            problems: vec![broken()],
        };
        assert_eq!(
            render(&reply, NOW, false),
            "\
NAME             READY  STATUS            RESTARTS    IP         AGE  WAITING FOR
crasher          0/1    CrashLoopBackOff  3 (4s ago)  10.77.0.4  41s  restart in 36s (exit 3, back-off 40s)
web              1/1    Running           0           10.77.0.4  41s
kube-system/dns  1/1    Pending           0           –          41s
broken.yaml      –      InvalidManifest   –           –          12s  spec.containers[0].image: required
"
        );
        assert_eq!(render(&ListPodsReply::default(), NOW, false), "no pods\n");
    }

    #[test]
    fn the_wide_table_has_source_worker_and_uid() {
        let reply = ListPodsReply { pods: vec![pod("web", "Running")], problems: vec![broken()] };
        let wide = render(&reply, NOW, true);
        let lines: Vec<Vec<&str>> = wide.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(lines[0][6..], ["SOURCE", "WORKER", "UID", "WAITING", "FOR"]);
        assert_eq!(lines[1][6..], ["file", "sync", "uid-web"]);
        assert_eq!(lines[2][6..9], ["file", "–", "–"]);
    }

    #[test]
    fn a_wait_with_an_end_has_the_remaining_time() {
        let wait = |message: &str, until| {
            let w = Waiting {
                reason: "ImagePullBackOff".into(),
                message: message.into(),
                until_unix_ns: until,
                ..Waiting::default()
            };
            waiting(&w, NOW)
        };
        assert_eq!(wait("no such image", NOW + 5 * S), "no such image (again in 5s)");
        assert_eq!(wait("no such image", 0), "no such image");
        assert_eq!(wait("", 0), "ImagePullBackOff");
        assert_eq!(wait("", NOW - S), "ImagePullBackOff (again in 0s)");
    }

    #[test]
    fn data_has_formatted_times_and_the_object() {
        let mut p = crasher();
        p.pod = br#"{"metadata":{"name":"crasher"}}"#.to_vec();
        let value =
            serde_json::to_value(data(&ListPodsReply { pods: vec![p], problems: vec![broken()] })).unwrap();
        assert_eq!(value["pods"][0]["waiting"]["until"], "2027-01-15T08:00:36.000Z");
        assert_eq!(value["pods"][0]["pod"]["metadata"]["name"], "crasher");
        assert_eq!(value["problems"][0]["field"], "spec.containers[0].image");
    }
}
