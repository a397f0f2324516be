//! `quintctl trace`: the operations of one pod across all services, from the spans in the services' ring
//! buffers.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;

use quintctl_text::{clean, fit, moment, took};
use quintlet_kit::args::paths::Paths;
use quintlet_proto::debug::v1::debug_client::DebugClient;
use quintlet_proto::debug::v1::{Span, TracesRequest};
use quintlet_proto::podsync::v1::GetPodRequest;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use serde::Serialize;

use crate::client::Peer;
use crate::error::Error;
use crate::out::{Format, print};

/// Width of the time axis, in characters.
const AXIS: usize = 48;

/// Maximum width of a span's name, in characters.
const NAME: usize = 40;

/// The span attribute with the UID of the pod.
const POD_UID: &str = "k8s.pod.uid";

/// Show the operations of the services for a pod, with the duration of each step.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct TraceArgs {
    /// Pod: name, NAMESPACE/NAME or UID; a removed pod by its UID only
    pub(crate) pod: String,
    /// Number of newest operations to show; 0 shows all
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(crate) limit: usize,
    /// Include operations of a single step without an error, such as syncs that changed nothing
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Only operations that took at least this many milliseconds
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub(crate) min_ms: u32,
    /// Only the trace whose ID has this prefix
    #[arg(long, value_name = "ID")]
    pub(crate) id: Option<String>,
}

pub(crate) async fn run(args: TraceArgs, paths: &Paths, format: Format) -> Result<(), Error> {
    let found = fetch(paths, &args.pod).await?;
    let mut operations = operations(found.spans, &found.uid);
    operations.retain(|o| {
        (args.all || args.id.is_some() || o.did_something())
            && o.took_ns() >= i64::from(args.min_ms) * 1_000_000
            && args.id.as_ref().is_none_or(|id| o.trace_id.starts_with(id.as_str()))
    });
    if args.limit > 0 {
        operations.truncate(args.limit);
    }
    print(format.render(&operations, |wide| render(&operations, &found.name, &found.missing, wide))?)
}

/// A pod and the spans of all services, which are not filtered by pod yet.
#[derive(Debug, Default)]
pub(crate) struct PodSpans {
    pub(crate) uid: String,
    /// `NAMESPACE/NAME`, or the UID of a removed pod.
    pub(crate) name: String,
    pub(crate) spans: Vec<Span>,
    /// The errors of services that do not answer.
    pub(crate) missing: Vec<String>,
}

/// Fetches the spans of all services.
///
/// # Errors
/// No service answers, or pod-sync does not return the pod and `pod` is not a UID.
pub(crate) async fn fetch(paths: &Paths, pod: &str) -> Result<PodSpans, Error> {
    let (uid, name) = find(paths, pod).await?;
    let peers = Peer::all(paths);
    let answers = futures::future::join_all(peers.iter().map(spans)).await;
    let mut found = PodSpans { uid, name, ..PodSpans::default() };
    let mut failed = None;
    let mut answered = false;
    for answer in answers {
        match answer {
            Ok(spans) => {
                answered = true;
                found.spans.extend(spans);
            }
            Err(error) => {
                found.missing.push(quintlet_kit::error_chain(&error));
                failed = Some(error);
            }
        }
    }
    match failed {
        Some(error) if !answered => Err(error),
        Some(_) | None => Ok(found),
    }
}

/// Returns the UID and the name of a pod. For a removed pod, `pod` must be the UID, and is also returned as
/// the name.
async fn find(paths: &Paths, pod: &str) -> Result<(String, String), Error> {
    let peer = Peer::pod_sync(paths);
    let ask = async {
        let mut client = PodSyncClient::new(peer.channel().await?);
        peer.call(client.get_pod(GetPodRequest { pod: pod.to_owned() })).await
    };
    match ask.await {
        Ok(view) => Ok((view.uid, format!("{}/{}", view.namespace, view.name))),
        Err(_) if looks_like_uid(pod) => Ok((pod.to_owned(), pod.to_owned())),
        Err(error) => Err(error),
    }
}

/// Returns whether the text is a UUID or the hash that is the UID of a static pod.
fn looks_like_uid(text: &str) -> bool {
    let hex = text.chars().filter(|c| *c != '-').collect::<String>();
    hex.len() == 32 && hex.chars().all(|c| c.is_ascii_hexdigit())
}

async fn spans(peer: &Peer) -> Result<Vec<Span>, Error> {
    let mut client = DebugClient::new(peer.channel().await?);
    // Unfiltered, since only one span of a trace has the attribute of the pod.
    Ok(peer.list(client.traces(TracesRequest::default())).await?.spans)
}

/// The spans of one trace. Times are nanoseconds since 1970.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Operation {
    /// Hexadecimal.
    pub(crate) trace_id: String,
    pub(crate) start_unix_ns: i64,
    pub(crate) end_unix_ns: i64,
    /// Each parent precedes its children; siblings are in order of start.
    pub(crate) spans: Vec<NestedSpan>,
}

impl Operation {
    /// Returns whether the operation has more than one step or an error.
    #[must_use]
    pub(crate) fn did_something(&self) -> bool {
        self.spans.len() > 1 || self.spans.iter().any(|s| !s.error.is_empty())
    }

    /// Returns whether the operation has a step that is not a read, or an error.
    #[must_use]
    pub(crate) fn changed_something(&self) -> bool {
        self.did_something() && self.spans.iter().any(|s| !s.error.is_empty() || !is_read(s))
    }

    fn took_ns(&self) -> i64 {
        self.end_unix_ns - self.start_unix_ns
    }
}

/// One span of an operation. Times are nanoseconds since 1970.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NestedSpan {
    pub(crate) service: String,
    pub(crate) name: String,
    /// Number of ancestors in the trace.
    pub(crate) depth: usize,
    pub(crate) start_unix_ns: i64,
    pub(crate) end_unix_ns: i64,
    /// Empty if the step succeeded.
    pub(crate) error: String,
    pub(crate) attributes: BTreeMap<String, String>,
}

/// Returns the operations of a pod, newest first: the traces with a span of the pod, without the spans of
/// other pods.
#[must_use]
pub(crate) fn operations(spans: Vec<Span>, uid: &str) -> Vec<Operation> {
    let of_pod: BTreeSet<String> = spans
        .iter()
        .filter(|s| s.attributes.get(POD_UID).is_some_and(|u| u == uid))
        .map(|s| s.trace_id.clone())
        .collect();
    let mut traces: BTreeMap<String, Vec<Span>> = BTreeMap::new();
    for span in spans {
        // A trace may have spans of several pods, such as that of a relist.
        let of_other = span.attributes.get(POD_UID).is_some_and(|u| u != uid && !u.is_empty());
        if of_pod.contains(&span.trace_id) && !of_other {
            traces.entry(span.trace_id.clone()).or_default().push(span);
        }
    }
    let mut out: Vec<Operation> = traces.into_iter().map(|(id, spans)| operation(id, spans)).collect();
    out.sort_by_key(|o| std::cmp::Reverse(o.start_unix_ns));
    out
}

fn operation(trace_id: String, mut spans: Vec<Span>) -> Operation {
    spans.sort_by(|a, b| (a.start_unix_ns, b.end_unix_ns).cmp(&(b.start_unix_ns, a.end_unix_ns)));
    spans.dedup_by(|a, b| a.span_id == b.span_id && !a.span_id.is_empty());
    let known: BTreeSet<&str> = spans.iter().map(|s| s.span_id.as_str()).collect();
    let mut children: HashMap<&str, Vec<usize>> = HashMap::new();
    let mut roots = Vec::new();
    for (i, span) in spans.iter().enumerate() {
        // The parent may have been dropped from its ring buffer, or may not have ended yet. A span that names
        // itself as its parent would be its own child.
        if known.contains(span.parent_span_id.as_str()) && span.parent_span_id != span.span_id {
            children.entry(&span.parent_span_id).or_default().push(i);
        } else {
            roots.push(i);
        }
    }
    let mut steps = Vec::with_capacity(spans.len());
    let mut stack: Vec<(usize, usize)> = roots.into_iter().rev().map(|i| (i, 0)).collect();
    while let Some((i, depth)) = stack.pop() {
        let span = &spans[i];
        steps.push(NestedSpan {
            service: span.service.clone(),
            name: span.name.clone(),
            depth,
            start_unix_ns: span.start_unix_ns,
            end_unix_ns: span.end_unix_ns.max(span.start_unix_ns),
            error: span.error.clone(),
            attributes: span.attributes.clone().into_iter().collect(),
        });
        let inside = children.remove(span.span_id.as_str()).unwrap_or_default();
        stack.extend(inside.into_iter().rev().map(|i| (i, depth + 1)));
    }
    let start_unix_ns = steps.iter().map(|s| s.start_unix_ns).min().unwrap_or_default();
    let end_unix_ns = steps.iter().map(|s| s.end_unix_ns).max().unwrap_or_default();
    Operation { trace_id, start_unix_ns, end_unix_ns, spans: steps }
}

/// Returns whether the step only reads: the work of pleg-service, the worker's own span, and reading calls of
/// the runtime.
fn is_read(step: &NestedSpan) -> bool {
    const READS: [&str; 5] = ["Status", "Version", "ListContainers", "ListPodSandbox", "RuntimeConfig"];
    step.service == "pleg-service"
        || step.service == "pod-sync"
        || READS.contains(&step.name.as_str())
        || step.name.ends_with("Status") && step.service == "cri-proxy"
}

/// Formats a waterfall per operation; `wide` adds the attributes.
#[must_use]
pub(crate) fn render(operations: &[Operation], pod: &str, missing: &[String], wide: bool) -> String {
    let mut out = String::new();
    // Writing to a String does not fail.
    if operations.is_empty() {
        let _ = writeln!(out, "no recorded operations of {}", clean(pod));
    }
    for (i, operation) in operations.iter().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        waterfall(&mut out, operation, pod, wide);
    }
    for error in missing {
        let _ = writeln!(out, "missing spans: {error}");
    }
    out
}

fn waterfall(out: &mut String, operation: &Operation, pod: &str, wide: bool) {
    let names: Vec<String> = operation.spans.iter().map(step_name).collect();
    let services = operation.spans.iter().map(|s| s.service.chars().count()).max().unwrap_or(0);
    let width = names.iter().map(|n| n.chars().count()).max().unwrap_or(0);
    let title = operation.spans.first().map(|s| clean(&s.name)).unwrap_or_default();
    let pod = pod_name(operation).unwrap_or_else(|| clean(pod));
    let head = if title.ends_with(&pod) { title } else { format!("{title} {pod}") };
    let id = operation.trace_id.get(..8).unwrap_or(&operation.trace_id);
    let total = took(operation.took_ns());
    let _ = writeln!(out, "{head}  {}  total {total}  trace {id}", moment(operation.start_unix_ns));
    for (step, name) in operation.spans.iter().zip(names) {
        let bar = bar(
            step.start_unix_ns - operation.start_unix_ns,
            step.end_unix_ns - operation.start_unix_ns,
            operation.took_ns(),
            AXIS,
        );
        let took = took(step.end_unix_ns - step.start_unix_ns);
        let error = if step.error.is_empty() { String::new() } else { format!("  ! {}", clean(&step.error)) };
        let _ = writeln!(out, "{:<services$}  {name:<width$}  {bar} {took:>8}{error}", clean(&step.service));
        if wide {
            for (key, value) in &step.attributes {
                let _ = writeln!(out, "{:<services$}    {}={}", "", clean(key), clean(value));
            }
        }
    }
}

/// Returns `NAMESPACE/NAME` of the pod, as the spans have it.
fn pod_name(operation: &Operation) -> Option<String> {
    operation.spans.iter().find_map(|step| {
        let attribute = |key| step.attributes.get(key).filter(|value| !value.is_empty());
        let (namespace, name) = (attribute("k8s.namespace.name")?, attribute("k8s.pod.name")?);
        Some(format!("{}/{}", clean(namespace), clean(name)))
    })
}

/// Returns the name of a step with its type of probe, its container or its image.
fn step_name(step: &NestedSpan) -> String {
    let mut name = clean(&step.name);
    for key in ["probe.type", "k8s.container.name", "image"] {
        if let Some(value) = step.attributes.get(key)
            && !value.is_empty()
            && !name.contains(value.as_str())
        {
            let _ = write!(name, " {}", clean(value));
        }
    }
    if let Some(queued) =
        step.attributes.get("queued_ms").filter(|q| q.parse::<f64>().is_ok_and(|q| q >= 0.1))
    {
        let _ = write!(name, " (queued {}ms)", clean(queued));
    }
    fit(&format!("{}{name}", "  ".repeat(step.depth.min(8))), NAME)
}

/// Returns a bar from `start` to `end` on an axis from 0 to `total`, which is `width` characters wide. The
/// resolution is an eighth of a character.
#[must_use]
pub(crate) fn bar(start: i64, end: i64, total: i64, width: usize) -> String {
    const LEFT: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    let cells = i128::try_from(width).unwrap_or(0);
    let eighths = cells * 8;
    let scale = |at: i64| {
        if total <= 0 {
            0
        } else {
            (i128::from(at.clamp(0, total)) * eighths + i128::from(total) / 2) / i128::from(total)
        }
    };
    // The bar has at least one eighth, within the axis.
    let first = scale(start).min(eighths - 1);
    let last = scale(end).max(first + 1);
    (0..cells)
        .map(|cell| {
            let (low, high) = ((first - cell * 8).clamp(0, 8), (last - cell * 8).clamp(0, 8));
            match (low, high) {
                (l, h) if l >= h => ' ',
                (0, 8) => '█',
                (0, h) => LEFT.get(usize::try_from(h).unwrap_or(0)).copied().unwrap_or('█'),
                (7, 8) => '▕',
                // Unicode has only two right-aligned blocks: a half and an eighth.
                (4.., 8) => '▐',
                (_, 8) => '█',
                _ => '▎',
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: i64 = 1_000_000;

    /// Returns a span with the IDs of its trace, itself and its parent; `start` and `end` in milliseconds.
    fn span(ids: [&str; 3], service: &str, name: &str, (start, end): (i64, i64), uid: &str) -> Span {
        let [trace, id, parent] = ids;
        Span {
            trace_id: trace.to_owned(),
            span_id: id.to_owned(),
            parent_span_id: parent.to_owned(),
            service: service.to_owned(),
            name: name.to_owned(),
            start_unix_ns: start * MS,
            end_unix_ns: end * MS,
            attributes: if uid.is_empty() {
                HashMap::new()
            } else {
                [(POD_UID.to_owned(), uid.to_owned())].into()
            },
            error: String::new(),
        }
    }

    #[test]
    fn an_operation_has_all_spans_of_its_trace_but_those_of_other_pods_and_the_newest_comes_first() {
        let spans = vec![
            span(["t1", "c", "b"], "cri-proxy", "StartContainer", (30, 40), ""),
            span(["t1", "a", "gone"], "pod-sync", "pod pass", (10, 50), "u1"),
            span(["t1", "b", "a"], "pod-sync", "start", (20, 45), ""),
            span(["t1", "x", "a"], "pod-sync", "other", (20, 45), "u2"),
            span(["t2", "d", ""], "pleg-service", "inspect", (60, 61), "u1"),
            span(["t3", "e", ""], "pleg-service", "inspect", (70, 71), "u2"),
        ];
        let found = operations(spans, "u1");
        let summary: Vec<(&str, Vec<(usize, &str)>)> = found
            .iter()
            .map(|o| (o.trace_id.as_str(), o.spans.iter().map(|s| (s.depth, s.name.as_str())).collect()))
            .collect();
        assert_eq!(
            summary,
            [
                ("t2", vec![(0, "inspect")]),
                ("t1", vec![(0, "pod pass"), (1, "start"), (2, "StartContainer")])
            ]
        );
    }

    #[test]
    fn a_cycle_of_parent_spans_is_handled() {
        let spans = vec![
            span(["t", "a", "b"], "s", "one", (1, 2), "u"),
            span(["t", "b", "a"], "s", "two", (1, 2), "u"),
            span(["t", "c", "c"], "s", "own", (1, 2), "u"),
        ];
        assert_eq!(operations(spans, "u")[0].spans.len(), 1);
    }

    #[test]
    fn bars_are_within_the_axis_and_always_visible() {
        for (start, end, total, want) in [
            (0, 100, 100, "████"),
            (0, 50, 100, "██  "),
            (50, 100, 100, "  ██"),
            (0, 0, 100, "▏   "),
            (100, 100, 100, "   ▕"),
            (0, 0, 0, "▏   "),
            (13, 50, 100, "▐█  "),
            (-5, 500, 100, "████"),
        ] {
            assert_eq!(bar(start, end, total, 4), want, "{start}..{end} of {total}");
        }
    }

    #[test]
    fn the_waterfall_has_service_name_bar_and_duration() {
        let mut failed = span(["0123456789", "b", "a"], "cri-proxy", "CreateContainer", (60, 110), "");
        failed.error = "Unknown: no\nspace".to_owned();
        failed.attributes.insert("k8s.container.name".to_owned(), "app".to_owned());
        failed.attributes.insert("queued_ms".to_owned(), "0.3".to_owned());
        let found = operations(
            vec![span(["0123456789", "a", ""], "pod-sync", "pod pass", (10, 110), "u"), failed],
            "u",
        );
        let full = "█".repeat(48);
        let half = " ".repeat(24) + &"█".repeat(24);
        assert_eq!(
            render(&found, "default/web", &[], false),
            format!(
                "\
pod pass default/web  1970-01-01T00:00:00.010Z  total 100.0ms  trace 01234567
pod-sync   pod pass                              {full}  100.0ms
cri-proxy    CreateContainer app (queued 0.3ms)  {half}   50.0ms  ! Unknown: no space
"
            )
        );
        assert!(render(&found, "web", &[], true).contains("queued_ms=0.3"));
        let mut probe = span(["t", "a", ""], "probe-service", "probe", (10, 110), "u");
        for (key, value) in [
            ("k8s.namespace.name", "default"),
            ("k8s.pod.name", "web"),
            ("k8s.container.name", "app"),
            ("probe.type", "Readiness"),
        ] {
            probe.attributes.insert(key.to_owned(), value.to_owned());
        }
        let shown = render(&operations(vec![probe], "u"), "u", &[], false);
        assert!(shown.starts_with("probe default/web  "), "{shown}");
        assert!(shown.contains("probe-service  probe Readiness app  "), "{shown}");
        let none = render(&[], "web", &["x does not answer".to_owned()], false);
        assert_eq!(none, "no recorded operations of web\nmissing spans: x does not answer\n");
    }
}
