//! `quintctl explain`: the last decision for a pod, its inputs, and what the pod waits for.

use std::fmt::Write as _;

use quintlet_kit::paths::Paths;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::{ExplainReply, ExplainRequest};
use serde::Serialize;

use crate::client::{MAX_RESPONSE_BYTES, Peer};
use crate::error::Error;
use crate::events::EventData;
use crate::out::{Format, print};
use crate::pods::{PodData, time, waiting};
use crate::text::{age, clean, moment, now_ns, or_nothing, took};
use crate::volumes::{VolumeData, explanation};

/// Number of newest events in the text.
const EVENTS: usize = 8;

/// Explain the state of a pod.
#[derive(Debug, Clone, clap::Args)]
pub struct ExplainArgs {
    /// Pod: name, NAMESPACE/NAME or UID
    pub pod: String,
}

pub async fn run(args: ExplainArgs, paths: &Paths, format: Format) -> Result<(), Error> {
    let reply = fetch(paths, &args.pod).await?;
    print(format.render(&data(&reply), |_| render(&reply, now_ns()))?)
}

/// Fetches the explanation from pod-sync.
///
/// # Errors
/// The pod does not exist, or pod-sync does not answer.
pub async fn fetch(paths: &Paths, pod: &str) -> Result<ExplainReply, Error> {
    let peer = Peer::pod_sync(paths);
    let mut client = PodSyncClient::new(peer.channel().await?).max_decoding_message_size(MAX_RESPONSE_BYTES);
    peer.call(client.explain(ExplainRequest { pod: pod.to_owned() })).await
}

/// Formats the explanation with ages relative to `now`, nanoseconds since 1970.
#[must_use]
pub fn render(reply: &ExplainReply, now: i64) -> String {
    let pod = reply.pod.clone().unwrap_or_default();
    let object: serde_json::Value = serde_json::from_slice(&pod.pod).unwrap_or_default();
    let phase = object.pointer("/status/phase").and_then(serde_json::Value::as_str).unwrap_or_default();
    let mut out = String::new();
    // Writing to a String does not fail.
    let _ = writeln!(
        out,
        "pod {}/{}  uid {}  phase {}  worker: {}",
        clean(&pod.namespace),
        clean(&pod.name),
        clean(&pod.uid),
        or_nothing(phase),
        or_nothing(&pod.worker)
    );
    let _ = writeln!(
        out,
        "  {:<10} {}  ready {}  ip {}  age {}  from {}",
        "status",
        or_nothing(&pod.status),
        or_nothing(&pod.ready),
        or_nothing(&pod.pod_ip),
        age(now - pod.created_unix_ns),
        or_nothing(&pod.source)
    );
    match &pod.waiting {
        Some(w) => {
            let container =
                if w.container.is_empty() { String::new() } else { format!(" of {}", clean(&w.container)) };
            let since = if w.since_unix_ns == 0 {
                String::new()
            } else {
                format!(", since {}", age(now - w.since_unix_ns))
            };
            let _ = writeln!(
                out,
                "  {:<10} {}{container}: {}{since}",
                "waits for",
                clean(&w.reason),
                waiting(w, now)
            );
        }
        None => {
            let _ = writeln!(out, "  {:<10} nothing", "waits for");
        }
    }
    for c in &reply.containers {
        let detail = if c.detail.is_empty() { String::new() } else { format!(" {}", clean(&c.detail)) };
        let _ = writeln!(
            out,
            "  {:<10} {}  {}{detail}, restarts {}",
            "container",
            clean(&c.name),
            clean(&c.state),
            c.restarts
        );
    }
    for volume in &reply.volumes {
        if let Some(text) = explanation(volume, now) {
            let name = if volume.name.is_empty() { &volume.spec_name } else { &volume.name };
            let _ = writeln!(out, "  {:<10} {}  {text}", "volume", clean(name));
        }
    }
    if reply.decided_unix_ns == 0 {
        let _ = writeln!(out, "  {:<10} none yet", "decision");
    } else {
        let _ = writeln!(
            out,
            "  {:<10} {} ({} ago)  seen runtime at epoch {} rev {}, {:.1}ms before",
            "decision",
            moment(reply.decided_unix_ns),
            took(now - reply.decided_unix_ns),
            reply.runtime_epoch,
            reply.runtime_rev,
            reply.observed_before_ms
        );
    }
    for line in &reply.decision {
        let _ = writeln!(out, "    → {}", clean(line));
    }
    if reply.last_errors.is_empty() {
        let _ = writeln!(out, "  {:<10} none", "errors");
    }
    for error in &reply.last_errors {
        let _ = writeln!(out, "  {:<10} {}", "error", clean(error));
    }
    let skip = reply.events.len().saturating_sub(EVENTS);
    for e in &reply.events[skip..] {
        let times = if e.count > 1 { format!(" (x{})", e.count) } else { String::new() };
        let _ = writeln!(
            out,
            "  {:<10} {} ago  {} {}: {}{times}",
            "event",
            age(now - e.at_unix_ns),
            clean(&e.r#type),
            clean(&e.reason),
            clean(&e.message)
        );
    }
    if !reply.trace_id.is_empty() {
        let _ = writeln!(out, "  {:<10} {}", "trace", clean(&reply.trace_id));
    }
    out
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Data {
    pod: Option<PodData>,
    decision: Vec<String>,
    decided: Option<String>,
    runtime_epoch: u64,
    runtime_rev: u64,
    observed_before_ms: f64,
    containers: Vec<ContainerData>,
    last_errors: Vec<String>,
    events: Vec<EventData>,
    trace_id: String,
    volumes: Vec<VolumeData>,
}

#[derive(Debug, Serialize)]
struct ContainerData {
    name: String,
    state: String,
    detail: String,
    restarts: u32,
}

fn data(reply: &ExplainReply) -> Data {
    Data {
        pod: reply.pod.as_ref().map(PodData::from),
        decision: reply.decision.clone(),
        decided: time(reply.decided_unix_ns),
        runtime_epoch: reply.runtime_epoch,
        runtime_rev: reply.runtime_rev,
        observed_before_ms: reply.observed_before_ms,
        containers: reply
            .containers
            .iter()
            .map(|c| ContainerData {
                name: c.name.clone(),
                state: c.state.clone(),
                detail: c.detail.clone(),
                restarts: c.restarts,
            })
            .collect(),
        last_errors: reply.last_errors.clone(),
        events: reply.events.iter().map(EventData::from).collect(),
        trace_id: reply.trace_id.clone(),
        volumes: reply.volumes.iter().map(VolumeData::from).collect(),
    }
}

#[cfg(test)]
mod tests {
    use quintlet_proto::podsync::v1::{
        ContainerExplain, EventView, PodView, VolumeState, VolumeView, Waiting,
    };

    use super::*;

    const S: i64 = 1_000_000_000;
    const NOW: i64 = 1_800_000_000 * S;

    #[test]
    fn explain_shows_the_wait_the_decision_and_its_input() {
        let pod = PodView {
            uid: "5f0c".into(),
            name: "crasher".into(),
            namespace: "default".into(),
            source: "file".into(),
            worker: "sync".into(),
            status: "CrashLoopBackOff".into(),
            ready: "0/1".into(),
            pod_ip: "10.77.0.5".into(),
            created_unix_ns: NOW - 41 * S,
            pod: br#"{"status":{"phase":"Running"}}"#.to_vec(),
            waiting: Some(Waiting {
                reason: "CrashLoopBackOff".into(),
                message: "restart after exit 3, back-off 40s".into(),
                container: "main".into(),
                since_unix_ns: NOW - 4 * S,
                until_unix_ns: NOW + 36 * S,
            }),
            ..PodView::default()
        };
        let reply = ExplainReply {
            pod: Some(pod),
            decision: vec!["start main at +36s".into()],
            decided_unix_ns: NOW - 4 * S,
            runtime_epoch: 7,
            runtime_rev: 1182,
            observed_before_ms: 0.94,
            containers: vec![ContainerExplain {
                name: "main".into(),
                state: "CrashLoopBackOff".into(),
                detail: "exited 3".into(),
                restarts: 3,
            }],
            last_errors: Vec::new(),
            events: vec![EventView {
                at_unix_ns: NOW - 4 * S,
                r#type: "Warning".into(),
                reason: "BackOff".into(),
                message: "Back-off restarting".into(),
                count: 2,
                ..EventView::default()
            }],
            trace_id: String::new(),
            volumes: vec![
                VolumeView {
                    name: "logs".into(),
                    state: VolumeState::Mounted.into(),
                    ..VolumeView::default()
                },
                VolumeView {
                    name: "data".into(),
                    state: VolumeState::NotMounted.into(),
                    call: "NodeStageVolume".into(),
                    call_since_unix_ns: NOW - 12 * S,
                    ..VolumeView::default()
                },
            ],
        };
        assert_eq!(
            render(&reply, NOW),
            "\
pod default/crasher  uid 5f0c  phase Running  worker: sync
  status     CrashLoopBackOff  ready 0/1  ip 10.77.0.5  age 41s  from file
  waits for  CrashLoopBackOff of main: restart in 36s (exit 3, back-off 40s), since 4s
  container  main  CrashLoopBackOff exited 3, restarts 3
  volume     data  not mounted, NodeStageVolume for 12s
  decision   2027-01-15T07:59:56.000Z (4.0s ago)  seen runtime at epoch 7 rev 1182, 0.9ms before
    → start main at +36s
  errors     none
  event      4s ago  Warning BackOff: Back-off restarting (x2)
"
        );
    }
}
