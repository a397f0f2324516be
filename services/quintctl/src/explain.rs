//! `quintctl explain`: the last decision for a pod, its inputs, and what the pod waits for.

use std::fmt::Write as _;

use quintctl_text::{age, clean, moment, now_ns, or_nothing, took};
use quintlet_kit::args::paths::Paths;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::{
    ContainerExplain, EventView, ExplainReply, ExplainRequest, PodView, VolumeView, Waiting,
};
use serde::Serialize;

use crate::client::Peer;
use crate::error::Error;
use crate::events::EventData;
use crate::out::{Format, print};
use crate::pods::{PodData, time, waiting};
use crate::volumes::{VolumeData, explanation};

/// Number of newest events in the text.
const EVENTS: usize = 8;

/// Explain the state of a pod.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ExplainArgs {
    /// Pod: name, NAMESPACE/NAME or UID
    pub(crate) pod: String,
}

pub(crate) async fn run(args: ExplainArgs, paths: &Paths, format: Format) -> Result<(), Error> {
    let reply = fetch(paths, &args.pod).await?;
    print(format.render(&data(&reply), |_| render(&reply, now_ns()))?)
}

/// Fetches the explanation from pod-sync.
///
/// # Errors
/// The pod does not exist, or pod-sync does not answer.
pub(crate) async fn fetch(paths: &Paths, pod: &str) -> Result<ExplainReply, Error> {
    let peer = Peer::pod_sync(paths);
    let mut client = PodSyncClient::new(peer.channel().await?);
    peer.call(client.explain(ExplainRequest { pod: pod.to_owned() })).await
}

/// Formats the explanation with ages relative to `now`, nanoseconds since 1970.
#[must_use]
pub(crate) fn render(reply: &ExplainReply, now: i64) -> String {
    let pod = reply.pod.clone().unwrap_or_default();
    let mut text = Text { out: String::new(), now };
    text.pod(&pod);
    text.waiting(pod.waiting.as_ref());
    text.containers(&reply.containers);
    text.volumes(&reply.volumes);
    text.decision(reply);
    text.errors(&reply.last_errors);
    text.events(&reply.events);
    if !reply.trace_id.is_empty() {
        text.row("trace", format_args!("{}", clean(&reply.trace_id)));
    }
    text.out
}

/// The text of an explanation: one labelled row per fact.
struct Text {
    out: String,
    now: i64,
}

impl Text {
    fn row(&mut self, label: &str, fact: std::fmt::Arguments<'_>) {
        // Writing to a String does not fail.
        let _ = writeln!(self.out, "  {label:<10} {fact}");
    }

    fn pod(&mut self, pod: &PodView) {
        let object: serde_json::Value = serde_json::from_slice(&pod.pod).unwrap_or_default();
        let phase = object.pointer("/status/phase").and_then(serde_json::Value::as_str).unwrap_or_default();
        let _ = writeln!(
            self.out,
            "pod {}/{}  uid {}  phase {}  worker: {}",
            clean(&pod.namespace),
            clean(&pod.name),
            clean(&pod.uid),
            or_nothing(phase),
            or_nothing(&pod.worker)
        );
        let age = age(self.now - pod.created_unix_ns);
        self.row(
            "status",
            format_args!(
                "{}  ready {}  ip {}  age {age}  from {}",
                or_nothing(&pod.status),
                or_nothing(&pod.ready),
                or_nothing(&pod.pod_ip),
                or_nothing(&pod.source)
            ),
        );
    }

    fn waiting(&mut self, wait: Option<&Waiting>) {
        let Some(wait) = wait else { return self.row("waits for", format_args!("nothing")) };
        let container =
            if wait.container.is_empty() { String::new() } else { format!(" of {}", clean(&wait.container)) };
        let since = match wait.since_unix_ns {
            0 => String::new(),
            since => format!(", since {}", age(self.now - since)),
        };
        let (reason, text) = (clean(&wait.reason), waiting(wait, self.now));
        self.row("waits for", format_args!("{reason}{container}: {text}{since}"));
    }

    fn containers(&mut self, containers: &[ContainerExplain]) {
        for container in containers {
            let detail = match &*container.detail {
                "" => String::new(),
                detail => format!(" {}", clean(detail)),
            };
            let (name, state) = (clean(&container.name), clean(&container.state));
            let restarts = container.restarts;
            self.row("container", format_args!("{name}  {state}{detail}, restarts {restarts}"));
        }
    }

    fn volumes(&mut self, volumes: &[VolumeView]) {
        for volume in volumes {
            let Some(text) = explanation(volume, self.now) else { continue };
            let name = if volume.name.is_empty() { &volume.spec_name } else { &volume.name };
            self.row("volume", format_args!("{}  {text}", clean(name)));
        }
    }

    fn decision(&mut self, reply: &ExplainReply) {
        if reply.decided_unix_ns == 0 {
            self.row("decision", format_args!("none yet"));
        } else {
            let ago = took(self.now - reply.decided_unix_ns);
            self.row(
                "decision",
                format_args!(
                    "{} ({ago} ago)  seen runtime at epoch {} rev {}, {:.1}ms before",
                    moment(reply.decided_unix_ns),
                    reply.runtime_epoch,
                    reply.runtime_rev,
                    reply.observed_before_ms
                ),
            );
        }
        for line in &reply.decision {
            let _ = writeln!(self.out, "    → {}", clean(line));
        }
    }

    fn errors(&mut self, errors: &[String]) {
        if errors.is_empty() {
            self.row("errors", format_args!("none"));
        }
        for error in errors {
            self.row("error", format_args!("{}", clean(error)));
        }
    }

    fn events(&mut self, events: &[EventView]) {
        for event in &events[events.len().saturating_sub(EVENTS)..] {
            let times = if event.count > 1 { format!(" (x{})", event.count) } else { String::new() };
            let kind = clean(&event.r#type);
            let reason = clean(&event.reason);
            let message = clean(&event.message);
            let ago = age(self.now - event.at_unix_ns);
            self.row("event", format_args!("{ago} ago  {kind} {reason}: {message}{times}"));
        }
    }
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
