//! Follows pleg-service's records to report the cost of its restart: the duration of the new snapshot and the
//! number of pods that changed.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use prost::Message as _;
use quintlet_kit::socket::CONNECT_INTERVAL;
use quintlet_proto::pleg::v1::pleg_client::PlegClient;
use quintlet_proto::pleg::v1::{PodRecord, WatchRequest, watch_event};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::lines::Line;
use super::link::{Link, Run, ended, read_again, say, why};
use crate::client::Peer;
use crate::error::Error;

/// A hash of the last record of each pod.
#[derive(Debug, Default)]
pub(super) struct Records {
    pods: BTreeMap<String, u64>,
    /// The records of an incomplete snapshot.
    snapshot: Option<BTreeMap<String, u64>>,
}

impl Records {
    fn begin(&mut self) {
        self.snapshot = Some(BTreeMap::new());
    }

    fn pod(&mut self, record: PodRecord) {
        let pods = self.snapshot.as_mut().unwrap_or(&mut self.pods);
        pods.insert(record.uid.clone(), fingerprint(record));
    }

    fn gone(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// Ends the snapshot. Returns the number of pods that changed since the previous one.
    fn end(&mut self) -> usize {
        let Some(now) = self.snapshot.take() else { return 0 };
        let changed = now.iter().filter(|(uid, hash)| self.pods.get(*uid) != Some(hash)).count();
        let gone = self.pods.keys().filter(|uid| !now.contains_key(*uid)).count();
        self.pods = now;
        changed + gone
    }
}

/// Hashes the state that the runtime reported. The time of observation and the revision do not count.
fn fingerprint(mut record: PodRecord) -> u64 {
    (record.rev, record.observed_boottime_ns) = (0, 0);
    // The encoding of a map has no defined order.
    let maps: Vec<BTreeMap<String, String>> = record
        .sandboxes
        .iter_mut()
        .flat_map(|s| [std::mem::take(&mut s.labels), std::mem::take(&mut s.annotations)])
        .chain(
            record
                .containers
                .iter_mut()
                .flat_map(|c| [std::mem::take(&mut c.labels), std::mem::take(&mut c.annotations)]),
        )
        .map(|map| map.into_iter().collect())
        .collect();
    let mut hasher = DefaultHasher::new();
    (record.encode_to_vec(), maps).hash(&mut hasher);
    hasher.finish()
}

/// Sends a line for each loss and return of pleg-service.
pub(super) async fn follow(peer: Peer, out: mpsc::Sender<Line>) {
    let mut link = Link::new(&peer.service);
    let mut records = Records::default();
    loop {
        let ended = stream(&peer, &mut link, &mut records, &out).await;
        let Err(error) = ended else { return };
        if !say(&out, link.lost(&why(&error))).await {
            return;
        }
        tokio::time::sleep(CONNECT_INTERVAL).await;
    }
}

/// Follows one stream. Returns Ok if the reader is gone.
async fn stream(
    peer: &Peer,
    link: &mut Link,
    records: &mut Records,
    out: &mpsc::Sender<Line>,
) -> Result<(), Error> {
    let mut client = PlegClient::new(peer.channel().await?);
    let request = WatchRequest { hello: Some(quintlet_proto::hello()), resume: None };
    let mut stream = peer.call(client.watch(request)).await?;
    let began = Instant::now();
    loop {
        // Both arms only wait. The second one ends the stream without waiting for a message.
        let message = tokio::select! {
            message = stream.message() => message.map_err(|s| peer.error(&s))?,
            () = out.closed() => return Ok(()),
        };
        let Some(message) = message else { return Err(ended(peer)) };
        let epoch = message.cursor.map_or(0, |c| c.epoch);
        match message.event {
            Some(watch_event::Event::SnapshotBegin(_)) => records.begin(),
            Some(watch_event::Event::Pod(record)) => records.pod(record),
            Some(watch_event::Event::Gone(gone)) => records.gone(&gone.uid),
            Some(watch_event::Event::SnapshotEnd(_)) => {
                let changed = records.end();
                let line = link.back(
                    Some(Run { id: epoch, name: format!("epoch {epoch}") }),
                    &read_again(began.elapsed(), changed),
                );
                if !say(out, line).await {
                    return Ok(());
                }
            }
            Some(
                watch_event::Event::Hello(_) | watch_event::Event::Resync(_) | watch_event::Event::Beat(_),
            )
            | None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use quintlet_proto::pleg::v1::{Container, ContainerState};

    use super::*;

    fn record(uid: &str, state: ContainerState, rev: u64) -> PodRecord {
        let labels = (0..20).map(|n| (format!("k{n}"), "v".to_owned())).collect();
        let container = Container { id: "c".into(), state: state.into(), labels, ..Container::default() };
        PodRecord {
            uid: uid.into(),
            containers: vec![container],
            rev,
            observed_boottime_ns: rev,
            ..PodRecord::default()
        }
    }

    #[test]
    fn a_change_is_another_state_in_the_runtime_or_a_removed_pod() {
        let (running, exited) = (ContainerState::Running, ContainerState::Exited);
        let mut records = Records::default();
        records.begin();
        records.pod(record("a", running, 1));
        records.pod(record("b", running, 2));
        assert_eq!(records.end(), 2);
        records.pod(record("c", running, 3));
        records.gone("b");
        for (snapshot, want) in [
            (vec![record("a", running, 90), record("c", running, 91)], 0),
            (vec![record("a", exited, 92), record("c", running, 93)], 1),
            (vec![record("d", running, 94)], 3),
        ] {
            records.begin();
            snapshot.into_iter().for_each(|r| records.pod(r));
            assert_eq!(records.end(), want);
        }
        assert_eq!(
            read_again(Duration::from_millis(38), 0),
            "snapshot received in 38.0ms, 0 pods changed meanwhile"
        );
    }
}
