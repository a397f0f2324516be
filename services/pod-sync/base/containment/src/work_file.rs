//! The work file: the pods whose work is in progress, one slot per pod, written in place.
//!
//! A process that crashes cannot record what it was doing. So the UID of a pod is written before its work
//! begins, with the number of threads that are running the work. Each change is a write of a few bytes to a
//! tmpfs, which takes about a microsecond.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use quintlet_kit::contain::OnThread;
use quintlet_model::ids::PodUid;

use crate::thread_gate::ThreadGate;

/// Bytes of the first line.
const HEADER: usize = 256;
/// Bytes of a slot: state (1), threads (1), length of the UID (2), UID (up to 256).
const SLOT: usize = 264;
const UID_AT: usize = 4;

const FREE: u8 = 0;
const IN_WORK: u8 = 1;

/// Content of the work file of the previous process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PreviousWork {
    /// Text of the first line.
    pub(crate) note: String,
    /// Pods whose work was in progress.
    pub(crate) in_work: BTreeSet<PodUid>,
    /// Pods of `in_work` whose work a thread was running.
    pub(crate) on_thread: BTreeSet<PodUid>,
}

/// The open work file. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct WorkFile(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    file: File,
    // Free slots, and the number of all slots.
    slots: Mutex<(Vec<usize>, usize)>,
}

impl WorkFile {
    /// Reads the file of the previous process at `path`, and creates an empty one with `note` in its first
    /// line.
    pub(crate) fn open(path: &Path, note: &str) -> io::Result<(Self, PreviousWork)> {
        let left = Self::read(path);
        // A new file, since the previous process may still have the old one open.
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            Ok(()) | Err(_) => {}
        }
        let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        let mut header = note.as_bytes().to_vec();
        header.resize(HEADER, b'\n');
        file.write_all_at(&header, 0)?;
        Ok((Self(Arc::new(Inner { file, slots: Mutex::default() })), left))
    }

    /// Returns the content of the file at `path`, which is empty if it cannot be read.
    pub(crate) fn read(path: &Path) -> PreviousWork {
        std::fs::read(path).map(|bytes| read(&bytes)).unwrap_or_default()
    }

    /// Records that work of a pod is in progress until the entry is dropped.
    #[must_use]
    pub(crate) fn begin(&self, uid: &PodUid) -> WorkEntry {
        let number = {
            let mut slots = self.0.slots.lock();
            slots.0.pop().unwrap_or_else(|| {
                let number = slots.1;
                slots.1 = number.saturating_add(1);
                number
            })
        };
        let entry = WorkEntry { file: self.clone(), number };
        let length = u16::try_from(uid.as_str().len()).unwrap_or(u16::MAX).to_le_bytes();
        let [low, high] = length;
        let mut bytes = vec![IN_WORK, 0, low, high];
        bytes.extend_from_slice(uid.as_str().as_bytes());
        entry.write(&bytes, 0);
        entry
    }
}

/// The slot of a pod whose work is in progress.
#[derive(Debug)]
pub(crate) struct WorkEntry {
    file: WorkFile,
    number: usize,
}

impl WorkEntry {
    fn write(&self, bytes: &[u8], at: usize) {
        let at = self.number.saturating_mul(SLOT).saturating_add(HEADER).saturating_add(at);
        // A failed write only loses the attribution of a crash; the work must not fail because of it.
        let _ = self.file.0.file.write_all_at(bytes, u64::try_from(at).unwrap_or(u64::MAX));
    }

    /// Returns an observer that records when a thread runs the work.
    ///
    /// `gate`: for a suspected pod, its UID and the gate that each thread passes first.
    #[must_use]
    pub(crate) fn threads(self: &Arc<Self>, gate: Option<(PodUid, Arc<ThreadGate>)>) -> Threads {
        Threads { entry: Arc::clone(self), number: Mutex::new(0), gate }
    }
}

impl Drop for WorkEntry {
    fn drop(&mut self) {
        self.write(&[FREE, 0], 0);
        self.file.0.slots.lock().0.push(self.number);
    }
}

/// Number of threads that run the work of one entry.
#[derive(Debug)]
pub(crate) struct Threads {
    entry: Arc<WorkEntry>,
    number: Mutex<u8>,
    gate: Option<(PodUid, Arc<ThreadGate>)>,
}

impl Threads {
    fn change(&self, change: impl FnOnce(u8) -> u8) {
        // Held during the write, so that writes are in order.
        let mut number = self.number.lock();
        *number = change(*number);
        self.entry.write(&[*number], 1);
    }
}

impl OnThread for Threads {
    fn enters(&self) {
        if let Some((uid, gate)) = &self.gate {
            gate.enter(uid);
        }
        self.change(|n| n.saturating_add(1));
    }

    fn leaves(&self) {
        self.change(|n| n.saturating_sub(1));
        if let Some((uid, gate)) = &self.gate {
            gate.leave(uid);
        }
    }
}

fn read(bytes: &[u8]) -> PreviousWork {
    let (header, slots) = bytes.split_at(bytes.len().min(HEADER));
    let note = String::from_utf8_lossy(header).trim_end().to_owned();
    let mut left = PreviousWork { note, ..PreviousWork::default() };
    for slot in slots.chunks(SLOT) {
        let Some((&[state, threads, low, high], rest)) = slot.split_first_chunk::<UID_AT>() else { continue };
        let uid = rest.get(..usize::from(u16::from_le_bytes([low, high])));
        let uid = uid.and_then(|uid| PodUid::parse(std::str::from_utf8(uid).ok()?).ok());
        let Some(uid) = uid.filter(|_| state == IN_WORK) else { continue };
        if threads > 0 {
            left.on_thread.insert(uid.clone());
        }
        left.in_work.insert(uid);
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid(name: &str) -> PodUid {
        PodUid::parse(name).unwrap()
    }

    #[test]
    fn the_next_process_reads_pods_in_work_and_those_that_a_thread_was_running() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(".work");
        let (marks, left) = WorkFile::open(&path, "first").unwrap();
        assert_eq!(left, PreviousWork::default());
        let done = marks.begin(&uid("done"));
        let waits = Arc::new(marks.begin(&uid("waits")));
        let runs = Arc::new(marks.begin(&uid("runs")));
        drop(done);
        let longest = marks.begin(&uid(&"l".repeat(256)));
        let (of_waits, of_runs) = (waits.threads(None), runs.threads(None));
        of_waits.enters();
        of_waits.leaves();
        of_runs.enters();
        of_runs.enters();
        of_runs.leaves();
        let (second, left) = WorkFile::open(&path, "second").unwrap();
        assert_eq!(left.note, "first");
        assert_eq!(left.in_work, [uid("waits"), uid("runs"), uid(&"l".repeat(256))].into());
        assert_eq!(left.on_thread, [uid("runs")].into());
        // Later writes to the first file do not change the second.
        drop((longest, of_waits, of_runs, waits, runs));
        drop(second);
        let (_third, left) = WorkFile::open(&path, "third").unwrap();
        assert_eq!((left.note.as_str(), left.in_work.len()), ("second", 0));
    }

    #[test]
    fn a_truncated_file_names_no_pod() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(".work");
        let (marks, _) = WorkFile::open(&path, "note").unwrap();
        let _mark = marks.begin(&uid("runs"));
        let bytes = std::fs::read(&path).unwrap();
        for end in 0..bytes.len() {
            let left = read(&bytes[..end]);
            assert!(left.in_work.is_empty(), "{end}: {left:?}");
        }
        assert_eq!(read(&bytes).in_work, [uid("runs")].into());
    }

    #[test]
    fn slots_are_reused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(".work");
        let (marks, _) = WorkFile::open(&path, "").unwrap();
        for n in 0..1000 {
            drop(marks.begin(&uid(&format!("u{n}"))));
        }
        let size = std::fs::metadata(&path).unwrap().len();
        assert!(size <= u64::try_from(HEADER + SLOT).unwrap(), "{size} bytes");
    }
}
