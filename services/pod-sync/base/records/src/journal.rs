//! The journal of a checkpoint: the changes since the checkpoint file was written, one line each.
//!
//! A checkpoint file has the entries of all pods. A change is appended to the journal instead, so that it
//! costs the same however many pods there are, and the file is written later. Each line has a checksum and a
//! JSON object. There are two kinds of lines:
//!
//! | line | meaning |
//! |---|---|
//! | `{"file": CONTENT}` | a file with this content has all changes before this line; appended before the file is written |
//! | `{"pod": [UID, ENTRY]}` | new entry of a pod; `null` if it was removed |
//!
//! The changes after the last line that names the content of the file are those that the file lacks. If no
//! line names it, another program has written the file, and the journal is not used.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use pod_sync_decisions::resize::allocation::PodResources;
use quintlet_kit::{atomic_file, failpoint};
use serde::{Deserialize, Serialize};

use crate::records::{CHECKSUM_LENGTH, checksum};

const MODE: u32 = 0o600;

/// A new entry of a pod, or `None` if it was removed.
pub(crate) type Change = (String, Option<PodResources>);

/// Identifies the content of a checkpoint file.
fn content_id(file: Option<&[u8]>) -> String {
    match file {
        Some(bytes) => format!("{} {}", bytes.len(), checksum(bytes)),
        None => "none".to_owned(),
    }
}

/// A line, with borrowed texts and entries where it is written.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Line<S, E> {
    File(S),
    Pod(S, E),
}

fn push_line(bytes: &mut Vec<u8>, line: &Line<&str, Option<&PodResources>>) -> io::Result<()> {
    let json = serde_json::to_vec(line)?;
    bytes.extend_from_slice(checksum(&json).as_bytes());
    bytes.extend_from_slice(&json);
    bytes.push(b'\n');
    Ok(())
}

/// Returns `None` for a line that was not written completely.
fn parse(line: &[u8]) -> Option<Line<String, Option<PodResources>>> {
    let (sum, json) = line.split_at_checked(CHECKSUM_LENGTH)?;
    if sum != checksum(json).as_bytes() {
        return None;
    }
    serde_json::from_slice(json).ok()
}

/// Returns the changes in the journal that the file with this content lacks. `None` if the journal does not
/// continue it.
fn changes_after(journal: &[u8], content: &str) -> Option<Vec<Change>> {
    let mut changes = None;
    // The text after the last line break was not written completely.
    let complete = journal.iter().rposition(|&b| b == b'\n').unwrap_or(0);
    for line in journal.get(..complete).unwrap_or_default().split(|&b| b == b'\n') {
        match (parse(line), &mut changes) {
            (None, _) => break,
            (Some(Line::File(named)), _) if named == content => changes = Some(Vec::new()),
            (Some(Line::Pod(uid, entry)), Some(changes)) => changes.push((uid, entry)),
            (Some(Line::File(_) | Line::Pod(..)), _) => {}
        }
    }
    changes
}

/// The journal of one checkpoint, open for more lines.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
    // Position of the last line that names a file.
    named_at: u64,
}

impl Journal {
    /// Returns the changes that a previous process recorded after it wrote the file with this content.
    pub(crate) fn read(path: &Path, file: Option<&[u8]>) -> Vec<Change> {
        let journal = match std::fs::read(path) {
            Ok(journal) => journal,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Vec::new(),
            Err(e) => {
                tracing::error!(path = %path.display(), error = %e, "failed to read journal of resource checkpoint");
                return Vec::new();
            }
        };
        changes_after(&journal, &content_id(file)).unwrap_or_else(|| {
            tracing::info!(path = %path.display(), "another program has written the resource checkpoint, its journal is not used");
            Vec::new()
        })
    }

    /// Replaces the journal at `path` by one with the changes since the file with this content.
    pub(crate) fn create(path: PathBuf, file: Option<&[u8]>, changes: &[Change]) -> io::Result<Self> {
        let mut bytes = Vec::new();
        push_line(&mut bytes, &Line::File(&content_id(file)))?;
        for (uid, entry) in changes {
            push_line(&mut bytes, &Line::Pod(uid, entry.as_ref()))?;
        }
        Self::replace(path, &bytes)
    }

    fn replace(path: PathBuf, bytes: &[u8]) -> io::Result<Self> {
        atomic_file::write(&path, bytes, MODE)?;
        let file = File::options().read(true).append(true).open(&path)?;
        Ok(Self { path, file, named_at: 0 })
    }

    /// Appends changes. After a failure the journal must not be used any more, since it may end in a part of
    /// a line.
    pub(crate) fn append<'a>(
        &mut self,
        changes: impl Iterator<Item = (&'a str, Option<&'a PodResources>)>,
    ) -> io::Result<()> {
        let mut bytes = Vec::new();
        for (uid, entry) in changes {
            push_line(&mut bytes, &Line::Pod(uid, entry))?;
        }
        self.write(&bytes)
    }

    /// Records that a file with this content has all changes so far. Called before the file is written. After
    /// a failure the journal must not be used any more.
    pub(crate) fn name_file(&mut self, file: &[u8]) -> io::Result<()> {
        let mut bytes = Vec::new();
        push_line(&mut bytes, &Line::File(&content_id(Some(file))))?;
        let at = self.file.seek(SeekFrom::End(0))?;
        self.write(&bytes)?;
        self.named_at = at;
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        failpoint::file!("journal appended", || self.file.write_all(bytes))
    }

    /// Drops the lines before the one that names the last file. Called after that file was written.
    pub(crate) fn shorten(mut self) -> io::Result<Self> {
        self.file.seek(SeekFrom::Start(self.named_at))?;
        let mut rest = Vec::new();
        self.file.read_to_end(&mut rest)?;
        Self::replace(self.path, &rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pod_sync_decisions::resize::allocation::of_pod;
    use quintlet_testkit::pods::pod_json;
    use serde_json::json;

    fn entry(cpu: &str) -> PodResources {
        of_pod(&pod_json(json!({"containers": [{"name": "a", "image": "i",
            "resources": {"requests": {"cpu": cpu}}}]})))
    }

    fn set(uid: &str, cpu: &str) -> Change {
        (uid.to_owned(), Some(entry(cpu)))
    }

    fn append(journal: &mut Journal, changes: &[Change]) {
        journal.append(changes.iter().map(|(uid, entry)| (uid.as_str(), entry.as_ref()))).unwrap();
    }

    #[test]
    fn changes_after_the_content_of_the_file_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j");
        assert_eq!(Journal::read(&path, None), [], "there is no journal");
        let first = [set("u1", "1")];
        let mut journal = Journal::create(path.clone(), None, &first).unwrap();
        let second = [set("u2", "2"), ("u1".to_owned(), None)];
        append(&mut journal, &second);
        let all = [&first[..], &second].concat();
        assert_eq!(Journal::read(&path, None), all);
        assert_eq!(
            Journal::read(&path, Some(b"another")),
            [],
            "the file is not the one before these changes"
        );
        journal.name_file(b"file").unwrap();
        let third = [set("u3", "3")];
        append(&mut journal, &third);
        assert_eq!(Journal::read(&path, Some(b"file")), third);
        assert_eq!(Journal::read(&path, None), [all, third.to_vec()].concat(), "the file was not written");
        let mut journal = journal.shorten().unwrap();
        assert_eq!(Journal::read(&path, Some(b"file")), third);
        assert_eq!(Journal::read(&path, None), []);
        append(&mut journal, &first);
        assert_eq!(Journal::read(&path, Some(b"file")), [&third[..], &first].concat());
    }

    #[test]
    fn an_incomplete_or_damaged_line_ends_the_journal() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j");
        let _journal = Journal::create(path.clone(), None, &[set("u1", "1"), set("u2", "2")]).unwrap();
        let whole = std::fs::read(&path).unwrap();
        let ends: Vec<usize> = (0..whole.len()).filter(|&i| whole[i] == b'\n').collect();
        for cut in 0..=whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let lines = ends.iter().filter(|&&end| end < cut).count();
            assert_eq!(Journal::read(&path, None).len(), lines.saturating_sub(1), "{cut} bytes");
        }
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            std::fs::write(&path, &bytes).unwrap();
            let line = ends.iter().filter(|&&end| end < at).count();
            assert_eq!(Journal::read(&path, None).len(), line.saturating_sub(1), "byte {at} is wrong");
        }
    }
}
