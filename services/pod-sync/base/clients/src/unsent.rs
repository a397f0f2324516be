//! The events that status-reporter has not written, in memory and in a file that a restarted pod-sync reads.
//!
//! An event is appended to the file before the record of its pod has the change that it reports. So a kill of
//! pod-sync loses no event of a change that the next pod-sync does not make again. The file is on a tmpfs,
//! where a write takes about a microsecond. Its first line has the boot ID: events of another boot are
//! dropped. The entries follow, oldest first:
//!
//! | bytes | content |
//! |---|---|
//! | 1 | 1 while the event is unsent, 0 once it was written, dropped or refused |
//! | 4 | length of the event |
//! | 4 | CRC-32 of the event |
//! | length | the event, as the message `RecordEventRequest` |
//!
//! Numbers are little-endian. Once all events are sent, the next one overwrites the first entry.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use prost::Message as _;
use quintlet_kit::atomic_file;
use quintlet_proto::status::v1::RecordEventRequest;

/// Maximum number of unsent events (staging/src/k8s.io/client-go/tools/record: maxQueuedEvents).
pub(crate) const QUEUE: usize = 1000;

/// Maximum number of unsent events of one object, so that a pod whose probes fail with ever new messages
/// leaves room for the events of others. Of one object, status-reporter writes 25 at once.
const QUEUE_OF_OBJECT: usize = 100;

const SENT: u8 = 0;
const UNSENT: u8 = 1;

/// Number of bytes of an entry that precede its event.
const HEAD: usize = 9;

/// Bytes above which the file is shortened once all events are sent, and by which it may grow before that.
const LARGE: u64 = 1 << 20;

/// Events that status-reporter has not written, oldest first.
#[derive(Debug)]
pub struct UnsentEvents {
    path: PathBuf,
    header: Vec<u8>,
    queue: VecDeque<Unsent>,
    // `None` after a failed write: events are in memory only, until all are sent.
    file: Option<File>,
    // The last write failed, which was logged.
    is_failing: bool,
    // Place of the next entry.
    end: u64,
    // Value of `end` at which the file is shortened.
    limit: u64,
}

#[derive(Debug)]
struct Unsent {
    event: RecordEventRequest,
    // Place of the entry; `None` if the file lacks it.
    at: Option<u64>,
}

impl UnsentEvents {
    // Blocks: the state directory is on a tmpfs, see `pod_sync_records::records`.
    /// Reads the events that the previous process of this boot has left in the file at `path`. A missing file
    /// is created.
    ///
    /// A failure is logged. Events are then in memory only.
    #[must_use]
    pub fn open(path: PathBuf, boot: &str) -> Self {
        let header = format!("quintlet-events 1 {boot}\n").into_bytes();
        let left = match std::fs::read(&path) {
            Ok(bytes) => bytes.strip_prefix(&*header).map(unsent_in).unwrap_or_default(),
            Err(e) => {
                if e.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(path = %path.display(), error = %e, "failed to read unsent events");
                }
                Vec::new()
            }
        };
        let queue = left.into_iter().map(|event| Unsent { event, at: None }).collect();
        let mut this = Self { path, header, queue, file: None, is_failing: false, end: 0, limit: LARGE };
        this.rewrite();
        this
    }

    /// Adds an event. Returns false if the queue or the share of its object is full, and the event is lost.
    pub(crate) fn push(&mut self, event: RecordEventRequest) -> bool {
        let of_object = self.queue.iter().filter(|unsent| is_of_same_object(&unsent.event, &event));
        if self.queue.len() >= QUEUE || of_object.count() >= QUEUE_OF_OBJECT {
            return false;
        }
        let at = self.append(&event);
        self.queue.push_back(Unsent { event, at });
        if self.end > self.limit {
            self.rewrite();
        }
        true
    }

    /// Returns the number of events.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Returns the oldest event.
    pub(crate) fn first(&self) -> Option<&RecordEventRequest> {
        self.queue.front().map(|unsent| &unsent.event)
    }

    /// Removes the oldest event, which status-reporter has written, dropped or refused.
    pub(crate) fn remove_first(&mut self) {
        let Some(sent) = self.queue.pop_front() else { return };
        if let (Some(at), Some(file)) = (sent.at, &self.file)
            && let Err(e) = file.write_all_at(&[SENT], at)
        {
            self.abandon(&e);
        }
        if self.queue.is_empty() {
            if self.file.is_none() || self.end > LARGE {
                self.rewrite();
            }
            self.end = offset(self.header.len());
        }
    }

    /// Appends an entry to the file, and returns its place.
    fn append(&mut self, event: &RecordEventRequest) -> Option<u64> {
        let file = self.file.as_ref()?;
        let mut entry = Vec::new();
        push_entry(&mut entry, event);
        if let Err(e) = file.write_all_at(&entry, self.end) {
            self.abandon(&e);
            return None;
        }
        let at = self.end;
        self.end = at.saturating_add(offset(entry.len()));
        Some(at)
    }

    // Blocks: the state directory is on a tmpfs, see `pod_sync_records::records`.
    // The next process would send again what is sent from now on. So the file is removed.
    fn abandon(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.is_failing, true) {
            tracing::warn!(path = %self.path.display(), %error, "failed to write unsent events, a restart of pod-sync may lose some");
        }
        self.file = None;
        let _ = std::fs::remove_file(&self.path);
    }

    // Blocks: the state directory is on a tmpfs, see `pod_sync_records::records`.
    // Replaces the file by one with the unsent events only.
    fn rewrite(&mut self) {
        let mut bytes = self.header.clone();
        for unsent in &mut self.queue {
            unsent.at = Some(offset(bytes.len()));
            push_entry(&mut bytes, &unsent.event);
        }
        self.end = offset(bytes.len());
        self.limit = self.end.saturating_add(LARGE);
        match replaced(&self.path, &bytes) {
            Ok(file) => (self.file, self.is_failing) = (Some(file), false),
            Err(e) => self.abandon(&e),
        }
    }
}

fn is_of_same_object(a: &RecordEventRequest, b: &RecordEventRequest) -> bool {
    a.uid == b.uid && a.name == b.name && a.namespace == b.namespace && a.kind == b.kind
}

fn replaced(path: &Path, bytes: &[u8]) -> io::Result<File> {
    atomic_file::write(path, bytes, 0o600)?;
    OpenOptions::new().write(true).open(path)
}

fn offset(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}

fn push_entry(bytes: &mut Vec<u8>, event: &RecordEventRequest) {
    let event = event.encode_to_vec();
    bytes.push(UNSENT);
    bytes.extend_from_slice(&u32::try_from(event.len()).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend_from_slice(&crc32fast::hash(&event).to_le_bytes());
    bytes.extend_from_slice(&event);
}

/// Reads entries up to the first one that was not written completely.
fn unsent_in(mut bytes: &[u8]) -> Vec<RecordEventRequest> {
    let mut events = Vec::new();
    while let Some((&[state, l0, l1, l2, l3, c0, c1, c2, c3], rest)) = bytes.split_first_chunk::<HEAD>() {
        let length = usize::try_from(u32::from_le_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
        let Some((body, rest)) = rest.split_at_checked(length) else { break };
        if crc32fast::hash(body) != u32::from_le_bytes([c0, c1, c2, c3]) {
            break;
        }
        let Ok(event) = RecordEventRequest::decode(body) else { break };
        if state == UNSENT {
            events.push(event);
        }
        bytes = rest;
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(message: &str) -> RecordEventRequest {
        RecordEventRequest { message: message.to_owned(), ..RecordEventRequest::default() }
    }

    fn messages(unsent: &UnsentEvents) -> Vec<&str> {
        unsent.queue.iter().map(|unsent| unsent.event.message.as_str()).collect()
    }

    fn file(dir: &tempfile::TempDir) -> PathBuf {
        dir.path().join(".events")
    }

    /// Returns the events that the next process of the same boot would read.
    fn left_in(dir: &tempfile::TempDir) -> Vec<String> {
        let copy = dir.path().join("copy");
        std::fs::copy(file(dir), &copy).unwrap();
        messages(&UnsentEvents::open(copy, "b1")).into_iter().map(str::to_owned).collect()
    }

    #[test]
    fn the_next_process_reads_the_events_that_were_not_sent_in_their_order() {
        let dir = tempfile::tempdir().unwrap();
        let mut unsent = UnsentEvents::open(file(&dir), "b1");
        assert_eq!(unsent.first(), None);
        // Later entries overwrite longer and shorter ones.
        for round in 0..50 {
            let all: Vec<String> = (0..round % 7).map(|i| "m".repeat((round * 31 + i * 17) % 90)).collect();
            for message in &all {
                assert!(unsent.push(event(message)));
            }
            for sent in 0..all.len() {
                assert_eq!(left_in(&dir), all[sent..]);
                assert_eq!(unsent.first(), Some(&event(&all[sent])));
                unsent.remove_first();
            }
            assert_eq!(left_in(&dir), [""; 0]);
        }
        for message in ["first", "second", "third"] {
            assert!(unsent.push(event(message)));
        }
        unsent.remove_first();
        let mut next = UnsentEvents::open(file(&dir), "b1");
        assert!(next.push(event("fourth")));
        next.remove_first();
        assert_eq!(left_in(&dir), ["third", "fourth"]);
        assert_eq!(messages(&UnsentEvents::open(file(&dir), "b2")), [""; 0], "another boot");
    }

    #[test]
    fn an_object_with_many_events_leaves_room_for_those_of_others() {
        let dir = tempfile::tempdir().unwrap();
        let mut unsent = UnsentEvents::open(file(&dir), "b1");
        let numbered =
            |uid: &str, n: usize| RecordEventRequest { uid: uid.to_owned(), ..event(&n.to_string()) };
        let added = (0..3 * QUEUE_OF_OBJECT).filter(|n| unsent.push(numbered("loud", *n))).count();
        assert_eq!(added, QUEUE_OF_OBJECT);
        assert!(unsent.push(numbered("quiet", 0)));
        unsent.remove_first();
        assert!(unsent.push(numbered("loud", 0)) && !unsent.push(numbered("loud", 1)));
        let others = (0..QUEUE).filter(|n| unsent.push(numbered(&format!("pod-{n}"), 0))).count();
        assert_eq!((others, unsent.len()), (QUEUE - QUEUE_OF_OBJECT - 1, QUEUE));
    }

    #[test]
    fn an_entry_that_was_not_written_completely_ends_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let mut unsent = UnsentEvents::open(file(&dir), "b1");
        let start = std::fs::read(file(&dir)).unwrap().len();
        assert!(unsent.push(event("first")));
        let complete = std::fs::read(file(&dir)).unwrap();
        assert!(unsent.push(event("second")));
        let whole = std::fs::read(file(&dir)).unwrap();
        for length in 0..whole.len() {
            let mut flipped = whole.clone();
            // The state of an entry is not in its checksum, and any other value than 1 is that of an event
            // that was sent.
            flipped[length] ^= 4;
            for bytes in [&whole[..length], &flipped] {
                std::fs::write(file(&dir), bytes).unwrap();
                let left = left_in(&dir);
                let are_first: &[&str] = match bytes.len() {
                    n if n == whole.len() && length == start => &["second"],
                    _ if length < complete.len().min(bytes.len()) || bytes.len() < complete.len() => &[],
                    _ => &["first"],
                };
                assert_eq!(left, are_first, "{length} of {}", bytes.len());
            }
        }
    }

    #[test]
    fn the_file_stays_small_while_events_are_sent_and_after_many_were_unsent() {
        let dir = tempfile::tempdir().unwrap();
        let mut unsent = UnsentEvents::open(file(&dir), "b1");
        let size = || std::fs::metadata(file(&dir)).unwrap().len();
        let long = "m".repeat(10_000);
        assert!(unsent.push(event("first")));
        for _ in 0..1000 {
            assert!(unsent.push(event(&long)));
            unsent.remove_first();
        }
        assert!(size() < 2 * LARGE, "never without unsent events: {}", size());
        assert_eq!(left_in(&dir), [long.as_str()]);
        for n in 1..QUEUE {
            assert!(unsent.push(RecordEventRequest { uid: n.to_string(), ..event(&long) }));
        }
        assert!(!unsent.push(event("too many")));
        assert_eq!(left_in(&dir).len(), QUEUE);
        for _ in 0..QUEUE {
            unsent.remove_first();
        }
        assert!(size() < 100, "all are sent: {}", size());
    }

    #[test]
    fn without_a_file_events_are_sent_and_a_later_file_has_none_of_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("missing").join(".events");
        let mut unsent = UnsentEvents::open(path.clone(), "b1");
        assert!(unsent.push(event("first")));
        std::fs::create_dir(path.parent().unwrap()).unwrap();
        assert!(unsent.push(event("second")));
        assert_eq!(messages(&unsent), ["first", "second"]);
        assert!(!path.exists());
        unsent.remove_first();
        unsent.remove_first();
        assert!(unsent.push(event("third")));
        assert_eq!(messages(&UnsentEvents::open(path, "b1")), ["third"]);
    }

    #[test]
    fn after_a_failed_write_no_event_is_left_to_be_sent_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut unsent = UnsentEvents::open(file(&dir), "b1");
        assert!(unsent.push(event("first")));
        unsent.file = Some(File::open(file(&dir)).unwrap());
        assert!(unsent.push(event("second")));
        assert!(!file(&dir).exists(), "it cannot be written");
        assert_eq!(messages(&unsent), ["first", "second"]);
        unsent.remove_first();
        unsent.remove_first();
        assert!(unsent.push(event("third")));
        assert_eq!(left_in(&dir), ["third"]);
    }
}
