//! The streams of the services. Each stream is reopened when it ends.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quintctl_text::now_ns;
use quintlet_kit::args::paths::Paths;
use quintlet_kit::socket::CONNECT_INTERVAL;
use quintlet_kit::task::TaskGroup;
use quintlet_proto::debug::v1::BuildRequest;
use quintlet_proto::debug::v1::debug_client::DebugClient;
use quintlet_proto::pleg::v1::pleg_client::PlegClient;
use quintlet_proto::pleg::v1::{LifecycleRequest, lifecycle_event};
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::{WatchPodsRequest, watch_pods_event};
use quintlet_proto::probe::v1::probe_client::ProbeClient;
use quintlet_proto::probe::v1::{Cursor, WatchRequest, watch_event};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::known::Known;
use super::lines::{Line, lifecycle_line, probe_line, service_line};
use super::link::{Link, Run, ended, read_again, say, why};
use crate::client::Peer;
use crate::error::Error;

/// Interval between scans for new instances of probe-service.
const SCAN: Duration = Duration::from_secs(1);

/// Time of the newest lifecycle event of each pod, nanoseconds since 1970.
#[derive(Debug, Clone, Default)]
pub(super) struct Events(Arc<Mutex<BTreeMap<String, i64>>>);

impl Events {
    fn record(&self, uid: &str, at: i64) {
        if let Ok(mut events) = self.0.lock() {
            events.insert(uid.to_owned(), at);
        }
    }

    fn of(&self, uid: &str) -> Option<i64> {
        self.0.lock().ok()?.get(uid).copied()
    }

    fn forget(&self, uid: &str) {
        if let Ok(mut events) = self.0.lock() {
            events.remove(uid);
        }
    }
}

/// Returns the process that serves the socket, or none if the call fails, since the process ID is only a
/// detail of the line.
async fn process(peer: &Peer) -> Option<Run> {
    let mut client = DebugClient::new(peer.channel().await.ok()?);
    let build = peer.call(client.build(BuildRequest {})).await.ok()?;
    Some(Run { id: build.pid.into(), name: format!("pid {}", build.pid) })
}

/// Reopens a stream until `$follow` returns Ok, which means that the reader is gone.
macro_rules! again {
    ($peer:expr, $link:expr, $out:expr, $follow:expr) => {
        loop {
            let Err(error) = $follow.await else { return };
            if !say(&$out, $link.lost(&why(&error))).await {
                return;
            }
            tokio::time::sleep(CONNECT_INTERVAL).await;
        }
    };
}

pub(super) async fn pods(peer: Peer, events: Events, out: mpsc::Sender<Line>) {
    let mut link = Link::new(&peer.service);
    let mut known = Known::default();
    again!(peer, link, out, follow_pods(&peer, &mut link, &mut known, &events, &out));
}

async fn follow_pods(
    peer: &Peer,
    link: &mut Link,
    known: &mut Known,
    events: &Events,
    out: &mpsc::Sender<Line>,
) -> Result<(), Error> {
    let mut client = PodSyncClient::new(peer.channel().await?);
    let request =
        WatchPodsRequest { hello: Some(quintlet_proto::hello()), brief: true, ..WatchPodsRequest::default() };
    let began = Instant::now();
    let mut stream = peer.call(client.watch_pods(request)).await?;
    known.begin();
    while let Some(event) = stream.message().await.map_err(|s| peer.error(&s))?.and_then(|m| m.event) {
        let now = now_ns();
        let mut lines = Vec::new();
        match event {
            watch_pods_event::Event::Hello(_) => {}
            watch_pods_event::Event::Pod(pod) => lines.extend(known.pod(&pod, now, events.of(&pod.uid))),
            watch_pods_event::Event::Removed(pod) => {
                events.forget(&pod.uid);
                lines.extend(known.removed(&pod.uid, now));
            }
            watch_pods_event::Event::Problems(p) => lines.extend(known.problems(&p.problems, now)),
            watch_pods_event::Event::SnapshotEnd(_) => {
                let (gone, changed) = known.end(now);
                lines.extend(gone);
                lines.extend(link.back(process(peer).await, &read_again(began.elapsed(), changed)));
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

/// Sends lifecycle events. The follower of pleg-service's records reports the loss and the return of the
/// service.
pub(super) async fn lifecycle(peer: Peer, events: Events, out: mpsc::Sender<Line>) {
    loop {
        if follow_lifecycle(&peer, &events, &out).await.is_ok() || out.is_closed() {
            return;
        }
        tokio::time::sleep(CONNECT_INTERVAL).await;
    }
}

async fn follow_lifecycle(peer: &Peer, events: &Events, out: &mpsc::Sender<Line>) -> Result<(), Error> {
    let mut client = PlegClient::new(peer.channel().await?);
    let request = LifecycleRequest { hello: Some(quintlet_proto::hello()), uid: String::new() };
    let mut stream = peer.call(client.lifecycle(request)).await?;
    while let Some(message) = next(peer, &mut stream, out).await? {
        let cursor = message.cursor.unwrap_or_default();
        let line = match message.event {
            Some(lifecycle_event::Event::Lifecycle(event)) => {
                events.record(&event.uid, event.at_unix_ns);
                lifecycle_line(&event, cursor.epoch, cursor.rev)
            }
            Some(lifecycle_event::Event::Missed(m)) => {
                service_line(&peer.service, format!("{} events missed", m.count))
            }
            Some(lifecycle_event::Event::Hello(_)) | None => continue,
        };
        if out.send(line).await.is_err() {
            break;
        }
    }
    Ok(())
}

/// Returns the next message, or none as soon as the reader is gone.
async fn next<T>(
    peer: &Peer,
    stream: &mut Streaming<T>,
    out: &mpsc::Sender<Line>,
) -> Result<Option<T>, Error> {
    // Both arms only wait; dropping them loses nothing.
    tokio::select! {
        message = stream.message() => match message.map_err(|s| peer.error(&s))? {
            Some(message) => Ok(Some(message)),
            None => Err(ended(peer)),
        },
        () = out.closed() => Ok(None),
    }
}

/// Follows the health of a service that has no events of pods.
pub(super) async fn health(peer: Peer, out: mpsc::Sender<Line>) {
    let mut link = Link::new(&peer.service);
    let mut last = None;
    again!(peer, link, out, follow_health(&peer, &mut link, &mut last, &out));
}

async fn follow_health(
    peer: &Peer,
    link: &mut Link,
    last: &mut Option<bool>,
    out: &mpsc::Sender<Line>,
) -> Result<(), Error> {
    let mut client = HealthClient::new(peer.channel().await?);
    let mut stream = peer.call(client.watch(HealthCheckRequest::default())).await?;
    if !say(out, link.back(process(peer).await, "")).await {
        return Ok(());
    }
    while let Some(message) = next(peer, &mut stream, out).await? {
        let serves = message.status() == ServingStatus::Serving;
        let before = last.replace(serves);
        let line = (before != Some(serves) && (before.is_some() || !serves)).then(|| {
            service_line(&peer.service, if serves { "serving again" } else { "not serving" }.to_owned())
        });
        if !say(out, line).await {
            break;
        }
    }
    Ok(())
}

/// Follows each instance of probe-service while its socket exists.
pub(super) async fn probers(paths: Paths, out: mpsc::Sender<Line>) {
    let tasks = TaskGroup::new();
    let mut followed: BTreeMap<PathBuf, CancellationToken> = BTreeMap::new();
    while !out.is_closed() {
        let peers = Peer::probes(&paths);
        followed.retain(|path, stop| {
            let exists = peers.iter().any(|p| p.path == *path);
            if !exists {
                stop.cancel();
            }
            exists
        });
        for peer in peers {
            followed.entry(peer.path.clone()).or_insert_with(|| {
                let stop = CancellationToken::new();
                let follow = probes(peer, out.clone());
                let child = stop.clone();
                tasks.spawn("watch probes", async move {
                    child.run_until_cancelled_owned(follow).await;
                });
                stop
            });
        }
        // Both arms only wait.
        tokio::select! {
            () = tokio::time::sleep(SCAN) => {}
            () = out.closed() => return,
        }
    }
}

async fn probes(peer: Peer, out: mpsc::Sender<Line>) {
    let mut link = Link::new(&peer.service);
    let mut at = None;
    again!(peer, link, out, follow_probes(&peer, &mut link, &out, &mut at));
}

/// Sends the evaluations of an instance. `at` is the cursor of the last evaluation that was sent; a new
/// stream resumes there.
async fn follow_probes(
    peer: &Peer,
    link: &mut Link,
    out: &mpsc::Sender<Line>,
    at: &mut Option<Cursor>,
) -> Result<(), Error> {
    let mut client = ProbeClient::new(peer.channel().await?);
    let request = WatchRequest { hello: Some(quintlet_proto::hello()), uid: String::new(), resume: *at };
    let mut stream = peer.call(client.watch(request)).await?;
    if !say(out, link.back(process(peer).await, "")).await {
        return Ok(());
    }
    while let Some(message) = next(peer, &mut stream, out).await? {
        let line = match message.event {
            Some(watch_event::Event::Evaluation(e)) => probe_line(&e),
            Some(watch_event::Event::Missed(m)) => {
                service_line(&peer.service, format!("{} results missed", m.count))
            }
            // The evaluations that the new process keeps follow.
            Some(watch_event::Event::Resync(_) | watch_event::Event::Hello(_)) | None => {
                *at = message.cursor.or(*at);
                continue;
            }
        };
        *at = message.cursor.or(*at);
        if out.send(line).await.is_err() {
            break;
        }
    }
    Ok(())
}
