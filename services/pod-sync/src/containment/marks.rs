//! The pods in work, in a file that outlives the process: one slot per pod in work, written in place.
//!
//! A process that dies has no time to say what it did. So the UID of a pod is in the file before its work begins, with the
//! number of threads that execute it at this moment. That takes a write of some bytes to a tmpfs, about a microsecond, when the
//! work begins and ends and when a thread starts and stops to execute it.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use quintlet_kit::contain::OnThread;
use quintlet_model::ids::PodUid;

/// Bytes of the first line, and of a slot: a state, a number of threads, a length of two bytes, a UID of up to 256.
const HEADER: usize = 256;
const SLOT: usize = 264;
const UID_AT: usize = 4;

const FREE: u8 = 0;
const IN_WORK: u8 = 1;

/// What an earlier process left in the file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Left {
    /// Boot, and what was noted of it.
    pub note: String,
    /// Pods that were in work.
    pub in_work: BTreeSet<PodUid>,
    /// Those of them that a thread executed at that moment.
    pub on_thread: BTreeSet<PodUid>,
}

/// The file. Clones share it.
#[derive(Debug, Clone)]
pub struct Marks(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    file: File,
    // Slots that may be taken, and how many there are.
    slots: Mutex<(Vec<usize>, usize)>,
}

impl Marks {
    /// Reads what an earlier process left at `path`, and starts with an empty file that has `note` in its first line.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn open(path: &Path, note: &str) -> io::Result<(Self, Left)> {
        let left = std::fs::read(path).map(|bytes| read(&bytes)).unwrap_or_default();
        // A file of its own: that of the earlier process may still be open.
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

    /// The pod is in work until the mark is dropped.
    #[must_use]
    pub fn begin(&self, uid: &PodUid) -> Mark {
        let number = {
            let mut slots = self.0.slots.lock();
            slots.0.pop().unwrap_or_else(|| {
                let number = slots.1;
                slots.1 = number.saturating_add(1);
                number
            })
        };
        let mark = Mark { marks: self.clone(), number };
        let length = u16::try_from(uid.as_str().len()).unwrap_or(u16::MAX).to_le_bytes();
        let [low, high] = length;
        let mut bytes = vec![IN_WORK, 0, low, high];
        bytes.extend_from_slice(uid.as_str().as_bytes());
        mark.write(&bytes, 0);
        mark
    }
}

/// A pod in work.
#[derive(Debug)]
pub struct Mark {
    marks: Marks,
    number: usize,
}

impl Mark {
    fn write(&self, bytes: &[u8], at: usize) {
        let at = self.number.saturating_mul(SLOT).saturating_add(HEADER).saturating_add(at);
        // A file that cannot be written names no pod after a death: the work itself must not fail for it.
        let _ = self.marks.0.file.write_all_at(bytes, u64::try_from(at).unwrap_or(u64::MAX));
    }

    /// For the work: tells the file when a thread executes it.
    #[must_use]
    pub fn threads(self: &Arc<Self>) -> Threads {
        Threads { mark: Arc::clone(self), number: Mutex::new(0) }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.write(&[FREE, 0], 0);
        self.marks.0.slots.lock().0.push(self.number);
    }
}

/// The threads that execute the work of one mark.
#[derive(Debug)]
pub struct Threads {
    mark: Arc<Mark>,
    number: Mutex<u8>,
}

impl Threads {
    fn change(&self, change: impl FnOnce(u8) -> u8) {
        // Held over the write: the last number written is the right one.
        let mut number = self.number.lock();
        *number = change(*number);
        self.mark.write(&[*number], 1);
    }
}

impl OnThread for Threads {
    fn enters(&self) {
        self.change(|n| n.saturating_add(1));
    }

    fn leaves(&self) {
        self.change(|n| n.saturating_sub(1));
    }
}

fn read(bytes: &[u8]) -> Left {
    let (header, slots) = bytes.split_at(bytes.len().min(HEADER));
    let note = String::from_utf8_lossy(header).trim_end().to_owned();
    let mut left = Left { note, ..Left::default() };
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
    fn the_next_process_reads_who_was_in_work_and_whom_a_thread_executed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(".work");
        let (marks, left) = Marks::open(&path, "first").unwrap();
        assert_eq!(left, Left::default());
        let done = marks.begin(&uid("done"));
        let waits = Arc::new(marks.begin(&uid("waits")));
        let runs = Arc::new(marks.begin(&uid("runs")));
        drop(done);
        let longest = marks.begin(&uid(&"l".repeat(256)));
        let (of_waits, of_runs) = (waits.threads(), runs.threads());
        of_waits.enters();
        of_waits.leaves();
        of_runs.enters();
        of_runs.enters();
        of_runs.leaves();
        let (second, left) = Marks::open(&path, "second").unwrap();
        assert_eq!(left.note, "first");
        assert_eq!(left.in_work, [uid("waits"), uid("runs"), uid(&"l".repeat(256))].into());
        assert_eq!(left.on_thread, [uid("runs")].into());
        // What the first still does is nothing to the second.
        drop((longest, of_waits, of_runs, waits, runs));
        drop(second);
        let (_third, left) = Marks::open(&path, "third").unwrap();
        assert_eq!((left.note.as_str(), left.in_work.len()), ("second", 0));
    }

    #[test]
    fn a_torn_file_names_nobody_it_does_not_have() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(".work");
        let (marks, _) = Marks::open(&path, "note").unwrap();
        let _mark = marks.begin(&uid("runs"));
        let bytes = std::fs::read(&path).unwrap();
        for end in 0..bytes.len() {
            let left = read(&bytes[..end]);
            assert!(left.in_work.is_empty(), "{end}: {left:?}");
        }
        assert_eq!(read(&bytes).in_work, [uid("runs")].into());
    }

    #[test]
    fn slots_are_used_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(".work");
        let (marks, _) = Marks::open(&path, "").unwrap();
        for n in 0..1000 {
            drop(marks.begin(&uid(&format!("u{n}"))));
        }
        let size = std::fs::metadata(&path).unwrap().len();
        assert!(size <= u64::try_from(HEADER + SLOT).unwrap(), "{size} bytes");
    }
}
