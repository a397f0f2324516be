//! Follows a log file through rotations.
//!
//! A rotation renames the file, and then the runtime creates a new one. For a moment the runtime still writes
//! to the old file. Later rotations compress and delete rotated files. A follower finds the files between its
//! open file and the newest one by their names, which are times.
//!
//! All files are opened beneath the directory of the log and never through a link: a process that can write
//! to the directory cannot redirect a read to another file. All calls block on the disk.

use std::collections::{BTreeSet, VecDeque};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use flate2::read::GzDecoder;
use quintlet_kit::beneath::Dir;

use crate::tail::tail_start;

/// Largest read, in bytes.
pub const BLOCK: usize = 64 << 10;

/// Bytes at the beginning of a file that identify it.
const HEAD: u64 = 4096;

/// Time for which the runtime may still write to a rotated file after it created the new one.
pub const LINGER: Duration = Duration::from_millis(250);

/// The outcome of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadOutcome {
    /// Bytes were read, and there may be more.
    Data,
    /// No byte was read. During a rotation, the caller reads again within [`LINGER`].
    Dry {
        /// A rotation is in progress.
        rotating: bool,
    },
}

/// A log file that is being read, and the files that replace it.
#[derive(Debug)]
pub struct Followed {
    /// The directory of the log.
    dir: Arc<Dir>,
    name: String,
    file: File,
    inode: u64,
    position: u64,
    /// Rotated files that existed when this file was opened, and are older. Without the suffix of compressed
    /// files.
    older: BTreeSet<String>,
    /// Time at which another file was found under this name.
    replaced: Option<Instant>,
    /// Files between this file and the one that has its name now. None while this file is being read.
    between: Option<Between>,
}

/// Rotated files between the open file and the newest one.
#[derive(Debug)]
struct Between {
    open: Option<Rotated>,
    names: VecDeque<String>,
    /// Rotated files that are older than the newest file, as of the last listing.
    known: BTreeSet<String>,
}

#[derive(Debug)]
enum Rotated {
    Plain(File),
    Compressed(Box<GzDecoder<File>>),
}

impl Read for Rotated {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(file) => file.read(buffer),
            Self::Compressed(file) => file.read(buffer),
        }
    }
}

impl Followed {
    /// Opens a file at its beginning, or at the beginning of its last `tail` lines. The path of its directory
    /// is trusted.
    ///
    /// # Errors
    /// The file cannot be opened or read, or it is not regular.
    pub fn open(path: &Path, tail: Option<u64>) -> io::Result<Self> {
        let parent = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Self::open_in(Arc::new(Dir::open(parent)?), file_name(path)?, tail)
    }

    /// Like [`Self::open`], for an untrusted path. The path is resolved beneath `root`, and no link is
    /// followed.
    ///
    /// # Errors
    /// As [`Self::open`], and the path leaves `root` or contains a link.
    pub fn open_beneath(root: &Dir, path: &Path, tail: Option<u64>) -> io::Result<Self> {
        let parent = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Self::open_in(Arc::new(root.dir(parent)?), file_name(path)?, tail)
    }

    fn open_in(dir: Arc<Dir>, name: String, tail: Option<u64>) -> io::Result<Self> {
        let mut older = plain_names(&dir, &name);
        let mut file = loop {
            let file = dir.read(Path::new(&name))?;
            // Without a rotation between the two listings, all listed files are older than the opened one.
            let now = plain_names(&dir, &name);
            if now.is_subset(&older) {
                break file;
            }
            older = now;
        };
        let inode = file.metadata()?.ino();
        let position = match tail {
            Some(lines) => tail_start(&mut file, lines)?,
            None => 0,
        };
        Ok(Self { dir, name, file, inode, position, older, replaced: None, between: None })
    }

    /// Reads from this file, and ignores files that replaced it.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read_here(&mut self, block: &mut Vec<u8>) -> io::Result<ReadOutcome> {
        if self.file.metadata()?.len() < self.position {
            // The file was truncated: read it from its beginning.
            self.position = 0;
        }
        self.file.seek(SeekFrom::Start(self.position))?;
        let read = fill(&mut self.file, block)?;
        self.position = self.position.saturating_add(read as u64);
        Ok(if read == 0 { ReadOutcome::Dry { rotating: false } } else { ReadOutcome::Data })
    }

    /// Reads from this file, and then from the files that replaced it.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn read(&mut self, now: Instant, block: &mut Vec<u8>) -> io::Result<ReadOutcome> {
        loop {
            if let Some(between) = &mut self.between {
                if fill_from(between, &self.dir, block)? > 0 {
                    return Ok(ReadOutcome::Data);
                }
                // The file was rotated again; the next read finds its successor.
                let next = Self::open_in(Arc::clone(&self.dir), self.name.clone(), None);
                let Ok(next) = next else { return Ok(ReadOutcome::Dry { rotating: true }) };
                // Further files were rotated while the earlier ones were read.
                let missed: Vec<_> = next.older.difference(&between.known).cloned().collect();
                if !missed.is_empty() {
                    between.known.extend(missed.iter().cloned());
                    between.names.extend(missed);
                    continue;
                }
                *self = next;
            }
            // Checked before the read, which then includes all bytes that were written before the rotation.
            let other = self.dir.stat(Path::new(&self.name)).is_ok_and(|s| s.st_ino != self.inode);
            let over = match (other, self.replaced) {
                (false, _) => false,
                (true, None) => {
                    self.replaced = Some(now);
                    false
                }
                (true, Some(since)) => now.saturating_duration_since(since) >= LINGER,
            };
            match self.read_here(block)? {
                ReadOutcome::Data => return Ok(ReadOutcome::Data),
                ReadOutcome::Dry { .. } if over => {
                    self.between = Some(self.since());
                }
                ReadOutcome::Dry { .. } => return Ok(ReadOutcome::Dry { rotating: other }),
            }
        }
    }

    /// Returns the files that were rotated after this one, oldest first, by their current names.
    fn since(&self) -> Between {
        let all = rotated(&self.dir, &self.name);
        let known = all.iter().map(|name| plain(name).to_owned()).collect();
        let mut newer: Vec<String> =
            all.into_iter().filter(|name| !self.older.contains(plain(name))).collect();
        newer.sort_by(|a, b| plain(a).cmp(plain(b)));
        // A file that is being compressed exists twice for a moment.
        newer.dedup_by(|a, b| plain(a) == plain(b));
        let own = newer.iter().position(|name| self.is_own(Path::new(name)));
        // If this file is not listed, it was deleted, and all listed files are newer.
        Between { open: None, names: newer.split_off(own.map_or(0, |i| i.saturating_add(1))).into(), known }
    }

    /// Reports whether a rotated file is this file, or was compressed from it.
    fn is_own(&self, path: &Path) -> bool {
        if !is_compressed(path) {
            return self.dir.stat(path).is_ok_and(|s| s.st_ino == self.inode);
        }
        let same = || -> io::Result<bool> {
            let mut file = self.dir.read(path)?;
            file.seek(SeekFrom::End(-4))?;
            let mut size = [0; 4];
            file.read_exact(&mut size)?;
            // The last four bytes are the uncompressed length (RFC 1952).
            if u64::from(u32::from_le_bytes(size)) != self.file.metadata()?.len() & u64::from(u32::MAX) {
                return Ok(false);
            }
            // Each line begins with its time, so that no two files have the same beginning.
            file.rewind()?;
            let (mut own, mut other) = (Vec::new(), Vec::new());
            (&self.file).rewind()?;
            (&self.file).take(HEAD).read_to_end(&mut own)?;
            GzDecoder::new(file).take(HEAD).read_to_end(&mut other)?;
            Ok(own == other)
        };
        same().unwrap_or(false)
    }
}

const GZ: &str = ".gz";

fn plain(name: &str) -> &str {
    name.strip_suffix(GZ).unwrap_or(name)
}

fn is_compressed(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "gz")
}

fn file_name(path: &Path) -> io::Result<String> {
    let name = path.file_name().and_then(|name| name.to_str());
    name.map(str::to_owned).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not a file name"))
}

/// Returns the names of the rotated files of a log, without the suffix of compressed files.
fn plain_names(dir: &Dir, name: &str) -> BTreeSet<String> {
    rotated(dir, name).iter().map(|name| plain(name).to_owned()).collect()
}

/// Returns the names of the rotated files of a log.
fn rotated(dir: &Dir, name: &str) -> BTreeSet<String> {
    let prefix = format!("{name}.");
    let names = dir.names().into_iter().flatten();
    names
        .filter_map(|name| name.into_string().ok())
        .filter(|n| n.starts_with(&prefix) && !n.ends_with(".tmp"))
        .collect()
}

/// Reads the rotated files in order. Returns 0 after the last one.
fn fill_from(between: &mut Between, dir: &Dir, block: &mut Vec<u8>) -> io::Result<usize> {
    loop {
        if let Some(file) = &mut between.open {
            let read = fill(file, block)?;
            if read > 0 {
                return Ok(read);
            }
        }
        let Some(name) = between.names.pop_front() else { return Ok(0) };
        // A deleted file cannot be read by anyone.
        between.open = open_rotated(dir, &name);
    }
}

/// Opens a rotated file, first by its plain name, since it may be compressed at any moment.
fn open_rotated(dir: &Dir, name: &str) -> Option<Rotated> {
    let bare = plain(name);
    if let Ok(file) = dir.read(Path::new(bare)) {
        return Some(Rotated::Plain(file));
    }
    let file = dir.read(Path::new(&format!("{bare}{GZ}"))).ok()?;
    Some(Rotated::Compressed(Box::new(GzDecoder::new(file))))
}

fn fill(reader: &mut impl Read, block: &mut Vec<u8>) -> io::Result<usize> {
    block.resize(BLOCK, 0);
    let read = reader.read(block);
    block.truncate(*read.as_ref().unwrap_or(&0));
    read
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use std::io::Write as _;

    use std::path::PathBuf;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    struct Log {
        dir: tempfile::TempDir,
        written: u32,
    }

    impl Log {
        fn new() -> Self {
            let log = Self { dir: tempfile::tempdir().unwrap(), written: 0 };
            std::fs::write(log.path(), "").unwrap();
            log
        }

        fn path(&self) -> PathBuf {
            self.dir.path().join("0.log")
        }

        fn write_to(&mut self, path: &Path) {
            self.written += 1;
            let mut file = std::fs::OpenOptions::new().append(true).open(path).unwrap();
            writeln!(file, "{}", self.written).unwrap();
        }

        fn write(&mut self) {
            let path = self.path();
            self.write_to(&path);
        }

        /// Rotates like the node; older files are compressed.
        fn rotate(&self, time: u32, keep: usize) -> PathBuf {
            let dir = Dir::open(self.dir.path()).unwrap();
            let mut old: Vec<_> = rotated(&dir, "0.log").into_iter().collect();
            for gone in old.drain(..old.len().saturating_sub(keep)) {
                std::fs::remove_file(self.dir.path().join(gone)).unwrap();
            }
            for name in old.iter().filter(|n| !n.ends_with(GZ)) {
                let path = self.dir.path().join(name);
                let gz = File::create(self.dir.path().join(format!("{name}.gz"))).unwrap();
                let mut gz = GzEncoder::new(gz, Compression::default());
                gz.write_all(&std::fs::read(&path).unwrap()).unwrap();
                gz.finish().unwrap();
                std::fs::remove_file(path).unwrap();
            }
            let rotated = self.dir.path().join(format!("0.log.{time:04}"));
            std::fs::rename(self.path(), &rotated).unwrap();
            std::fs::write(self.path(), "").unwrap();
            rotated
        }
    }

    /// Reads what there is; whether a rotation is under way.
    fn read(followed: &mut Followed, now: Instant, text: &mut Vec<u8>) -> bool {
        let mut block = Vec::new();
        loop {
            match followed.read(now, &mut block).unwrap() {
                ReadOutcome::Data => text.extend_from_slice(&block),
                ReadOutcome::Dry { rotating } => return rotating,
            }
        }
    }

    fn numbers(text: &[u8]) -> Vec<u32> {
        String::from_utf8_lossy(text).lines().map(|l| l.parse().unwrap()).collect()
    }

    #[test]
    fn late_writes_to_a_rotated_file_precede_the_content_of_the_new_file() {
        let now = Instant::now();
        let mut log = Log::new();
        let mut text = Vec::new();
        let mut followed = Followed::open(&log.path(), None).unwrap();
        log.write();
        let old = log.rotate(1, 3);
        assert!(read(&mut followed, now, &mut text), "look again soon");
        log.write_to(&old);
        log.write();
        assert!(!read(&mut followed, now + LINGER, &mut text));
        log.write();
        assert!(!read(&mut followed, now + LINGER, &mut text));
        assert_eq!(numbers(&text), [1, 2, 3, 4]);
    }

    #[test]
    fn a_reader_that_missed_rotations_reads_every_remaining_file_once() {
        for (rotations, keep, lost) in [(1, 3, 0), (2, 3, 0), (4, 3, 0), (4, 0, 2), (6, 2, 2)] {
            let now = Instant::now();
            let mut log = Log::new();
            log.write();
            log.rotate(0, keep);
            log.write();
            let mut followed = Followed::open(&log.path(), None).unwrap();
            let mut text = Vec::new();
            read(&mut followed, now, &mut text);
            for time in 1..=rotations {
                log.write();
                log.rotate(time, keep);
                log.write();
            }
            read(&mut followed, now, &mut text);
            read(&mut followed, now + LINGER, &mut text);
            let found = numbers(&text);
            assert!(found.is_sorted_by(|a, b| a < b), "{rotations} {keep}: {found:?}");
            // The line before the follower came is of the file before.
            let all = usize::try_from(log.written).unwrap() - 1;
            assert_eq!(all - found.len(), lost * 2, "{rotations} rotations, {keep} kept: {found:?}");
        }
    }

    #[test]
    fn a_file_that_is_rotated_while_earlier_files_are_read_is_read_too() {
        let now = Instant::now();
        let mut log = Log::new();
        let mut text = Vec::new();
        let mut followed = Followed::open(&log.path(), None).unwrap();
        log.write();
        log.rotate(1, 9);
        log.write();
        log.rotate(2, 9);
        assert!(read(&mut followed, now, &mut text));
        // The first of those in between is there; now two more come.
        let mut block = Vec::new();
        assert_eq!(followed.read(now + LINGER, &mut block).unwrap(), ReadOutcome::Data);
        text.extend_from_slice(&block);
        for time in [3, 4] {
            log.write();
            log.rotate(time, 9);
        }
        log.write();
        read(&mut followed, now + LINGER, &mut text);
        read(&mut followed, now + 2 * LINGER, &mut text);
        assert_eq!(numbers(&text), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn one_log_is_read_although_another_file_takes_its_name_and_only_if_it_is_a_file() {
        let mut log = Log::new();
        log.write();
        let mut followed = Followed::open(&log.path(), Some(1)).unwrap();
        log.rotate(1, 3);
        log.write();
        let mut block = Vec::new();
        assert_eq!(followed.read_here(&mut block).unwrap(), ReadOutcome::Data);
        assert_eq!(block, b"1\n");
        assert_eq!(followed.read_here(&mut block).unwrap(), ReadOutcome::Dry { rotating: false });
        let error = Followed::open(log.dir.path(), None).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn no_link_is_followed_to_the_log_or_its_successor() {
        let now = Instant::now();
        let mut log = Log::new();
        let outside = tempfile::tempdir().unwrap();
        let secret = outside.path().join("0.log");
        std::fs::write(&secret, "99\n").unwrap();
        let link = |name: &str, target: &Path| {
            std::os::unix::fs::symlink(target, log.dir.path().join(name)).unwrap()
        };
        link("link.log", &secret);
        link("out", outside.path());
        let root = Dir::open(log.dir.path()).unwrap();
        for path in ["link.log", "out/0.log", "../0.log"] {
            let path = log.dir.path().join(path);
            assert!(Followed::open_beneath(&root, &path, None).is_err(), "{}", path.display());
        }
        assert!(Followed::open_beneath(&root, &secret, None).is_err());
        let mut followed = Followed::open_beneath(&root, &log.path(), None).unwrap();
        log.write();
        // A rotation that puts links in the place of the new file and of one in between.
        log.rotate(1, 9);
        std::os::unix::fs::symlink(&secret, log.dir.path().join("0.log.0002")).unwrap();
        std::fs::remove_file(log.path()).unwrap();
        std::os::unix::fs::symlink(&secret, log.path()).unwrap();
        let mut text = Vec::new();
        read(&mut followed, now, &mut text);
        read(&mut followed, now + LINGER, &mut text);
        assert_eq!(numbers(&text), [1]);
        std::fs::remove_file(log.path()).unwrap();
        std::fs::write(log.path(), "").unwrap();
        log.write();
        read(&mut followed, now + 2 * LINGER, &mut text);
        read(&mut followed, now + 3 * LINGER, &mut text);
        assert_eq!(numbers(&text), [1, 2]);
    }
}
