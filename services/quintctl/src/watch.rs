//! `quintctl watch`: a line for each change of a pod, each lifecycle event and each probe, as they happen.
//!
//! Tasks: one per stream (pod-sync, pleg-service, each instance of probe-service) and one that looks for new instances.
//! All send into one channel; a stream that ends is opened again, and both are told. Ends with the reader.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use quintlet_kit::paths::Paths;
use quintlet_kit::task::TaskGroup;
use quintlet_proto::pleg::v1::pleg_client::PlegClient;
use quintlet_proto::pleg::v1::{Lifecycle, LifecycleKind, LifecycleRequest, lifecycle_event};
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::{PodView, SourceProblem, WatchPodsRequest, watch_pods_event};
use quintlet_proto::probe::v1::probe_client::ProbeClient;
use quintlet_proto::probe::v1::{Evaluation, Outcome, ProbeType, WatchRequest, watch_event};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::client::{MAX_ANSWER, Peer};
use crate::error::Error;
use crate::out::{Format, print};
use crate::pods::{INVALID_MANIFEST, Row, display_name};
use crate::text::{clean, now_ns, time_of_day, took};

/// Lines on their way to the terminal; when it does not keep up, the streams wait, and their services skip states.
const LINES: usize = 256;

/// Between two attempts to reach a service.
const RETRY: Duration = Duration::from_millis(100);

/// How often new instances of probe-service are looked for.
const SCAN: Duration = Duration::from_secs(1);

/// Changes as they happen.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct WatchArgs {
    /// Only of this pod: name, NAMESPACE/NAME or UID
    pub pod: Option<String>,
    /// Without probes that succeed
    #[arg(short, long)]
    pub quiet: bool,
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Line {
    /// When, nanoseconds since 1970.
    #[serde(serialize_with = "as_moment")]
    pub at: i64,
    /// `pleg`, `status`, `probe`, or `service` for what is about a service.
    pub source: &'static str,
    /// Name of the pod as people use it; the service's where it is about one.
    pub subject: String,
    /// What happened.
    pub text: String,
    /// UID of the pod; empty where it is about a service.
    pub uid: String,
    /// Of an evaluation: which probe, and whether it succeeded.
    #[serde(skip)]
    pub probe: Option<(String, bool)>,
}

fn as_moment<S: serde::Serializer>(at: &i64, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(&crate::text::moment(*at))
}

/// Runs until nobody reads.
///
/// # Errors
/// No service answers at the start, or nobody reads.
pub async fn run(args: WatchArgs, paths: &Paths, format: Format) -> Result<(), Error> {
    let pod_sync = Peer::pod_sync(paths);
    if let (Err(error), Err(_)) = (pod_sync.channel().await, Peer::pleg(paths).channel().await) {
        return Err(error);
    }
    let (lines, mut out) = mpsc::channel(LINES);
    let tasks = TaskGroup::new();
    tasks.spawn("watch pods", pods(pod_sync, lines.clone()));
    tasks.spawn("watch lifecycle", lifecycle(Peer::pleg(paths), lines.clone()));
    tasks.spawn("find probers", probers(paths.clone(), lines));
    let mut wanted = Wanted { args, succeeded: BTreeSet::new() };
    while let Some(line) = out.recv().await {
        if !wanted.has(&line) {
            continue;
        }
        let printed = format.render_line(&line, |_| render(&line)).and_then(print);
        if let Err(error) = printed {
            drop(out);
            return Err(error);
        }
    }
    Ok(())
}

/// Which lines are printed.
struct Wanted {
    args: WatchArgs,
    /// Probes that succeeded last.
    succeeded: BTreeSet<String>,
}

impl Wanted {
    /// Lines about services are always wanted; with `--quiet` a probe that goes on succeeding is not.
    fn has(&mut self, line: &Line) -> bool {
        let as_before = match &line.probe {
            Some((probe, true)) => !self.succeeded.insert(probe.clone()),
            Some((probe, false)) => {
                self.succeeded.remove(probe);
                false
            }
            None => false,
        };
        if as_before && self.args.quiet {
            return false;
        }
        match &self.args.pod {
            None => true,
            Some(_) if line.uid.is_empty() => line.source == "service",
            Some(pod) => {
                let name = pod.strip_prefix("default/").unwrap_or(pod);
                line.uid == *pod || line.subject == name || line.subject.ends_with(&format!("/{name}"))
            }
        }
    }
}

/// The line of a change.
#[must_use]
pub fn render(line: &Line) -> String {
    let at = time_of_day(line.at);
    if line.source == "service" {
        return format!("{at} ------ {} {}\n", line.subject, line.text);
    }
    format!("{at} {:<6} {:<16} {}\n", line.source, line.subject, line.text)
}

/// What was known of the pods, to tell what changed.
#[derive(Debug, Default)]
pub struct Known {
    pods: BTreeMap<String, (String, String)>,
    problems: BTreeSet<String>,
    seen: Option<BTreeSet<String>>,
    changed: usize,
}

impl Known {
    /// A new stream begins with a snapshot.
    pub fn begin(&mut self) {
        self.seen = Some(BTreeSet::new());
        self.changed = 0;
    }

    /// A pod as it is now. None where nothing of what is shown changed.
    pub fn pod(&mut self, pod: &PodView, now: i64) -> Option<Line> {
        if let Some(seen) = &mut self.seen {
            seen.insert(pod.uid.clone());
        }
        let row = Row::of_pod(pod, now);
        // Without the times that pass by themselves.
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
        let entry = (row.name.clone(), text.clone());
        if self.pods.get(&pod.uid) == Some(&entry) {
            return None;
        }
        self.pods.insert(pod.uid.clone(), entry);
        self.changed += 1;
        Some(Line { at: now, source: "status", subject: row.name, text, uid: pod.uid.clone(), probe: None })
    }

    /// A pod that is gone.
    pub fn removed(&mut self, uid: &str, now: i64) -> Option<Line> {
        let (subject, _) = self.pods.remove(uid)?;
        Some(Line {
            at: now,
            source: "status",
            subject,
            text: "gone".to_owned(),
            uid: uid.to_owned(),
            probe: None,
        })
    }

    /// The snapshot is complete: pods that are not in it are gone. Also how many pods changed since the stream before.
    pub fn end(&mut self, now: i64) -> (Vec<Line>, usize) {
        let Some(seen) = self.seen.take() else { return (Vec::new(), 0) };
        let gone: Vec<String> = self.pods.keys().filter(|uid| !seen.contains(*uid)).cloned().collect();
        let lines: Vec<Line> = gone.iter().filter_map(|uid| self.removed(uid, now)).collect();
        let changed = self.changed + lines.len();
        (lines, changed)
    }

    /// Manifests that cannot be used.
    pub fn problems(&mut self, problems: &[SourceProblem], now: i64) -> Vec<Line> {
        let mut said = BTreeSet::new();
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
                    uid: String::new(),
                    probe: None,
                });
            }
            said.insert(format!("{} {text}", row.name));
        }
        self.problems = said;
        out
    }
}

/// The line of a lifecycle event.
#[must_use]
pub fn lifecycle_line(event: &Lifecycle, epoch: u64, rev: u64) -> Line {
    let what = if event.container.is_empty() { "Sandbox" } else { "Container" };
    let kind = match event.kind() {
        LifecycleKind::Started => "Started",
        LifecycleKind::Died => "Died",
        LifecycleKind::Removed => "Removed",
        LifecycleKind::Changed | LifecycleKind::Unspecified => "Changed",
    };
    let subject =
        if event.container.is_empty() { String::new() } else { format!(" {}", clean(&event.container)) };
    let exit = if event.kind() == LifecycleKind::Died && !event.container.is_empty() {
        format!(" exit={}", event.exit_code)
    } else {
        String::new()
    };
    let said = format!("{what}{kind}{subject}{exit}");
    Line {
        at: event.at_unix_ns,
        source: "pleg",
        subject: display_name(&event.pod_namespace, &event.pod_name),
        text: format!("{said:<32} epoch {epoch} rev {rev}"),
        uid: event.uid.clone(),
        probe: None,
    }
}

/// The line of an evaluation.
#[must_use]
pub fn probe_line(e: &Evaluation) -> Line {
    let kind = match e.r#type() {
        ProbeType::Startup => "startup",
        ProbeType::Readiness => "readiness",
        ProbeType::Liveness => "liveness",
        ProbeType::Unspecified => "probe",
    };
    let outcome = match e.outcome() {
        Outcome::Success => "success",
        Outcome::Failure => "failure",
        Outcome::Unknown | Outcome::Unspecified => "unknown",
    };
    // Saturated at its threshold, which is often 1.
    let streak = if e.run > 1 { format!(" (streak {})", e.run) } else { String::new() };
    let said = format!("{kind} {} {outcome}{streak}", clean(&e.container));
    let duration = std::time::Duration::try_from_secs_f64(e.seconds).unwrap_or_default();
    let duration = took(i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX));
    let success = e.outcome() == Outcome::Success;
    let output =
        if success || e.output.is_empty() { String::new() } else { format!("  {}", clean(&e.output)) };
    Line {
        at: e.at_unix_ns,
        source: "probe",
        subject: display_name(&e.pod_namespace, &e.pod_name),
        text: format!("{said:<32} {duration}{output}"),
        uid: e.uid.clone(),
        probe: Some((format!("{} {} {kind}", e.uid, e.container), success)),
    }
}

fn service_line(service: &str, text: String) -> Line {
    Line {
        at: now_ns(),
        source: "service",
        subject: service.to_owned(),
        text,
        uid: String::new(),
        probe: None,
    }
}

/// What is told when a service comes and goes.
struct Link {
    service: String,
    /// Since when it is away; None before the first time it answered.
    away: Option<Instant>,
    answered: bool,
}

impl Link {
    fn new(service: &str) -> Self {
        Self { service: service.to_owned(), away: None, answered: false }
    }

    /// It does not answer. Told once, and not before it ever did.
    fn lost(&mut self, why: &str) -> Option<Line> {
        if self.away.is_some() {
            return None;
        }
        self.away = Some(Instant::now());
        let verb = if self.answered { "is away" } else { "does not answer yet" };
        Some(service_line(&self.service, format!("{verb}: {}", clean(why))))
    }

    /// It answers; `more` is what else there is to say.
    fn back(&mut self, more: &str) -> Option<Line> {
        let away = self.away.take();
        let first = !std::mem::replace(&mut self.answered, true);
        let text = match (away, first) {
            (None, _) => return None,
            (Some(_), true) => "answers".to_owned(),
            (Some(since), false) => {
                format!(
                    "is back after {}",
                    took(i64::try_from(since.elapsed().as_nanos()).unwrap_or(i64::MAX))
                )
            }
        };
        Some(service_line(&self.service, format!("{text}{more}")))
    }
}

/// Sends; false when nobody reads any more.
async fn say(out: &mpsc::Sender<Line>, line: Option<Line>) -> bool {
    match line {
        Some(line) => out.send(line).await.is_ok(),
        None => !out.is_closed(),
    }
}

async fn pods(peer: Peer, out: mpsc::Sender<Line>) {
    let mut link = Link::new(&peer.service);
    let mut known = Known::default();
    loop {
        let ended = follow_pods(&peer, &mut link, &mut known, &out).await;
        let Err(error) = ended else { return };
        if !say(&out, link.lost(&why(&error))).await {
            return;
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Ok: nobody reads any more.
async fn follow_pods(
    peer: &Peer,
    link: &mut Link,
    known: &mut Known,
    out: &mpsc::Sender<Line>,
) -> Result<(), Error> {
    let mut client = PodSyncClient::new(peer.channel().await?).max_decoding_message_size(MAX_ANSWER);
    let request = WatchPodsRequest { hello: Some(quintlet_proto::hello()), brief: true };
    let mut stream = peer.answer(client.watch_pods(request)).await?;
    known.begin();
    while let Some(event) = stream.message().await.map_err(|s| peer.failed(&s))?.and_then(|m| m.event) {
        let now = now_ns();
        let mut lines = Vec::new();
        match event {
            watch_pods_event::Event::Hello(_) => {}
            watch_pods_event::Event::Pod(pod) => lines.extend(known.pod(&pod, now)),
            watch_pods_event::Event::Removed(pod) => lines.extend(known.removed(&pod.uid, now)),
            watch_pods_event::Event::Problems(p) => lines.extend(known.problems(&p.problems, now)),
            watch_pods_event::Event::SnapshotEnd(_) => {
                let (gone, changed) = known.end(now);
                lines.extend(gone);
                lines.extend(link.back(&format!(", {changed} pods changed meanwhile")));
                link.answered = true;
            }
        }
        for line in lines {
            if out.send(line).await.is_err() {
                return Ok(());
            }
        }
    }
    Err(ended(peer))
}

fn ended(peer: &Peer) -> Error {
    Error::Silent {
        service: peer.service.clone(),
        path: peer.path.clone(),
        why: "the stream ended".to_owned(),
    }
}

/// The reason alone: the line begins with the service.
fn why(error: &Error) -> String {
    match error {
        Error::Unreachable { source, .. } => source.to_string(),
        Error::Silent { why, .. } => why.clone(),
        Error::Refused { message, .. } => message.clone(),
        other => quintlet_kit::error_chain(other),
    }
}

async fn lifecycle(peer: Peer, out: mpsc::Sender<Line>) {
    let mut link = Link::new(&peer.service);
    let mut epoch = 0;
    loop {
        let ended = follow_lifecycle(&peer, &mut link, &mut epoch, &out).await;
        let Err(error) = ended else { return };
        if !say(&out, link.lost(&why(&error))).await {
            return;
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn follow_lifecycle(
    peer: &Peer,
    link: &mut Link,
    epoch: &mut u64,
    out: &mpsc::Sender<Line>,
) -> Result<(), Error> {
    let mut client = PlegClient::new(peer.channel().await?);
    let request = LifecycleRequest { hello: Some(quintlet_proto::hello()), uid: String::new() };
    let mut stream = peer.answer(client.lifecycle(request)).await?;
    let health = peer.answer(client.health(quintlet_proto::pleg::v1::HealthRequest {})).await?;
    let restarted = if *epoch != 0 && health.epoch != *epoch { ": restarted" } else { "" };
    let more = format!("{restarted}, epoch {}", health.epoch);
    *epoch = health.epoch;
    if !say(out, link.back(&more)).await {
        return Ok(());
    }
    link.answered = true;
    loop {
        // Both only wait; a reader that is gone is noticed without a message.
        let message = tokio::select! {
            message = stream.message() => message.map_err(|s| peer.failed(&s))?,
            () = out.closed() => return Ok(()),
        };
        let Some(message) = message else { return Err(ended(peer)) };
        let cursor = message.cursor.unwrap_or_default();
        let line = match message.event {
            Some(lifecycle_event::Event::Lifecycle(event)) => {
                lifecycle_line(&event, cursor.epoch, cursor.rev)
            }
            Some(lifecycle_event::Event::Missed(m)) => {
                service_line(&peer.service, format!("{} events missed", m.count))
            }
            Some(lifecycle_event::Event::Hello(_)) | None => continue,
        };
        if out.send(line).await.is_err() {
            return Ok(());
        }
    }
}

/// Follows each instance of probe-service as long as its socket is there.
async fn probers(paths: Paths, out: mpsc::Sender<Line>) {
    let tasks = TaskGroup::new();
    let mut followed: BTreeMap<std::path::PathBuf, tokio_util::sync::CancellationToken> = BTreeMap::new();
    while !out.is_closed() {
        let peers = Peer::probes(&paths);
        followed.retain(|path, stop| {
            let there = peers.iter().any(|p| p.path == *path);
            if !there {
                stop.cancel();
            }
            there
        });
        for peer in peers {
            followed.entry(peer.path.clone()).or_insert_with(|| {
                let stop = tokio_util::sync::CancellationToken::new();
                let follow = probes(peer, out.clone());
                let child = stop.clone();
                tasks.spawn("watch probes", async move {
                    child.run_until_cancelled_owned(follow).await;
                });
                stop
            });
        }
        tokio::select! {
            () = tokio::time::sleep(SCAN) => {}
            () = out.closed() => return,
        }
    }
}

async fn probes(peer: Peer, out: mpsc::Sender<Line>) {
    let mut link = Link::new(&peer.service);
    loop {
        let ended = follow_probes(&peer, &mut link, &out).await;
        let Err(error) = ended else { return };
        if !say(&out, link.lost(&why(&error))).await {
            return;
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn follow_probes(peer: &Peer, link: &mut Link, out: &mpsc::Sender<Line>) -> Result<(), Error> {
    let mut client = ProbeClient::new(peer.channel().await?);
    let request = WatchRequest { hello: Some(quintlet_proto::hello()), uid: String::new() };
    let mut stream = peer.answer(client.watch(request)).await?;
    if !say(out, link.back("")).await {
        return Ok(());
    }
    link.answered = true;
    loop {
        // Both only wait; a reader that is gone is noticed without a message.
        let message = tokio::select! {
            message = stream.message() => message.map_err(|s| peer.failed(&s))?,
            () = out.closed() => return Ok(()),
        };
        let Some(message) = message else { return Err(ended(peer)) };
        let line = match message.event {
            Some(watch_event::Event::Evaluation(e)) => probe_line(&e),
            Some(watch_event::Event::Missed(m)) => {
                service_line(&peer.service, format!("{} results missed", m.count))
            }
            Some(watch_event::Event::Hello(_)) | None => continue,
        };
        if out.send(line).await.is_err() {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_800_000_000_112_000_000;

    fn pod(uid: &str, status: &str) -> PodView {
        PodView {
            uid: uid.into(),
            name: uid.into(),
            namespace: "default".into(),
            ready: "0/1".into(),
            status: status.into(),
            ..PodView::default()
        }
    }

    #[test]
    fn only_what_changed_is_told_and_a_reconnect_counts_what_it_missed() {
        let mut known = Known::default();
        known.begin();
        assert!(known.pod(&pod("a", "Pending"), NOW).is_some());
        assert!(known.pod(&pod("b", "Running"), NOW).is_some());
        assert_eq!(known.end(NOW), (Vec::new(), 2));
        assert!(known.pod(&pod("a", "Pending"), NOW + 1).is_none());
        known.begin();
        assert!(known.pod(&pod("a", "Pending"), NOW).is_none());
        let (gone, changed) = known.end(NOW);
        assert_eq!((gone[0].subject.as_str(), gone[0].text.as_str(), changed), ("b", "gone", 1));
    }

    #[test]
    fn lines_read_alike_whatever_their_source() {
        let died = Lifecycle {
            kind: LifecycleKind::Died.into(),
            uid: "u".into(),
            pod_name: "crasher".into(),
            pod_namespace: "default".into(),
            id: "c1".into(),
            container: "main".into(),
            exit_code: 3,
            at_unix_ns: NOW,
        };
        let evaluation = Evaluation {
            uid: "u".into(),
            pod_name: "web".into(),
            pod_namespace: "default".into(),
            container: "app".into(),
            r#type: ProbeType::Readiness.into(),
            outcome: Outcome::Success.into(),
            run: 12,
            seconds: 0.000_9,
            output: "ok".into(),
            at_unix_ns: NOW,
        };
        let lines = [
            lifecycle_line(&died, 7, 1182),
            Known::default().pod(&pod("crasher", "CrashLoopBackOff"), NOW).unwrap(),
            probe_line(&evaluation),
            Line {
                at: NOW,
                ..service_line("pleg-service", "is back after 38.0ms: restarted, epoch 8, 3 pods".into())
            },
        ];
        let text: String = lines.iter().map(render).collect();
        assert_eq!(
            text,
            "\
08:00:00.112 pleg   crasher          ContainerDied main exit=3        epoch 7 rev 1182
08:00:00.112 status crasher          0/1 CrashLoopBackOff
08:00:00.112 probe  web              readiness app success (streak 12) 900µs
08:00:00.112 ------ pleg-service is back after 38.0ms: restarted, epoch 8, 3 pods
"
        );
        let has = |pod: Option<&str>, quiet| {
            let args = WatchArgs { pod: pod.map(str::to_owned), quiet };
            let mut wanted = Wanted { args, succeeded: BTreeSet::new() };
            let _ = wanted.has(&lines[2]);
            lines.iter().map(|l| wanted.has(l)).collect::<Vec<_>>()
        };
        assert_eq!(has(None, true), [true, true, false, true]);
        assert_eq!(has(Some("web"), false), [false, false, true, true]);
    }

    #[test]
    fn a_problem_is_told_once_until_it_changes() {
        let mut known = Known::default();
        let problem = SourceProblem {
            source: "file".into(),
            origin: "/m/b.yaml".into(),
            field: "spec".into(),
            message: "required".into(),
            since_unix_ns: NOW,
        };
        let told = known.problems(std::slice::from_ref(&problem), NOW);
        assert_eq!(
            (told[0].subject.as_str(), told[0].text.as_str()),
            ("b.yaml", "InvalidManifest  spec: required")
        );
        assert!(known.problems(std::slice::from_ref(&problem), NOW + 5).is_empty());
        assert!(known.problems(&[], NOW).is_empty());
        assert_eq!(known.problems(&[problem], NOW).len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_service_that_goes_and_comes_is_told_once_each() {
        let mut link = Link::new("pleg-service");
        assert!(link.back("").is_none());
        assert_eq!(link.lost("refused").unwrap().text, "is away: refused");
        assert!(link.lost("refused").is_none());
        tokio::time::advance(Duration::from_millis(1500)).await;
        assert_eq!(link.back(": epoch 8").unwrap().text, "is back after 1.5s: epoch 8");
        assert!(link.back("").is_none());
        let mut never = Link::new("pod-sync");
        assert_eq!(never.lost("no file").unwrap().text, "does not answer yet: no file");
        assert_eq!(never.back("").unwrap().text, "answers");
    }
}
