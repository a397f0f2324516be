//! A log file that is followed through its rotations.
//!
//! A rotation gives the file another name, then the runtime makes a new one; for a moment it still writes to the old. Later
//! rotations compress and delete what was rotated before. Whoever reads on finds the files between the one it has open and
//! the newest by their names, which are times.
//!
//! All files are opened beneath the log's directory and never through a link, so that whoever may write there cannot have
//! another file read. Reading blocks on the disk; nothing here waits for anything else.

use std::collections::{BTreeSet, VecDeque};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use flate2::read::GzDecoder;
use quintlet_kit::beneath::Dir;

use crate::tail_start;

/// Read at once.
pub const BLOCK: usize = 64 << 10;

/// By so many bytes files of one log are told apart.
const HEAD: u64 = 4096;

/// The runtime may write to a rotated file so long after there is a new one: it has to swap the two and to flush.
pub const LINGER: Duration = Duration::from_millis(250);

/// What a read found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Bytes; there may be more.
    Data,
    /// Nothing for now. While a rotation is under way, look again within [`LINGER`].
    Dry {
        /// It is.
        rotating: bool,
    },
}

/// One log file being read, and those that take its name.
#[derive(Debug)]
pub struct Followed {
    /// The log's directory and its name in there.
    dir: Arc<Dir>,
    name: String,
    file: File,
    inode: u64,
    position: u64,
    /// Rotated files that were there when this one was opened: older than it. Without the ending of compressed ones.
    older: BTreeSet<String>,
    /// Since when another file has its name.
    replaced: Option<Instant>,
    /// What lies between this file and the one that has its name now; none while it is read itself.
    between: Option<Between>,
}

/// Files that had the name in the meantime.
#[derive(Debug)]
struct Between {
    open: Option<Rotated>,
    names: VecDeque<String>,
    /// All rotated files that are older than the one that has the name now, as far as that was looked at.
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
    /// Opens a file at its beginning, or at that of its last lines. The path of its directory is trusted.
    ///
    /// # Errors
    /// It cannot be opened or read, or is no regular file: whoever could put a pipe or a device there must not have it read.
    pub fn open(path: &Path, tail: Option<u64>) -> io::Result<Self> {
        let parent = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Self::open_in(Arc::new(Dir::open(parent)?), file_name(path)?, tail)
    }

    /// As [`Self::open`], for a path that nobody vouches for: it is resolved beneath `root`, and no link is followed.
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
            // Unless a rotation came between, what is there is older, and what comes is this file or a newer one.
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

    /// Reads on in this file alone, whatever has its name by now.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read_here(&mut self, block: &mut Vec<u8>) -> io::Result<Step> {
        if self.file.metadata()?.len() < self.position {
            // Truncated: it begins anew.
            self.position = 0;
        }
        self.file.seek(SeekFrom::Start(self.position))?;
        let read = fill(&mut self.file, block)?;
        self.position = self.position.saturating_add(read as u64);
        Ok(if read == 0 { Step::Dry { rotating: false } } else { Step::Data })
    }

    /// Reads on, here and in files that took this one's name since.
    ///
    /// # Errors
    /// One cannot be read.
    pub fn read(&mut self, now: Instant, block: &mut Vec<u8>) -> io::Result<Step> {
        loop {
            if let Some(between) = &mut self.between {
                if fill_from(between, &self.dir, block)? > 0 {
                    return Ok(Step::Data);
                }
                // Gone again already: the next look finds the next.
                let next = Self::open_in(Arc::clone(&self.dir), self.name.clone(), None);
                let Ok(next) = next else { return Ok(Step::Dry { rotating: true }) };
                // Rotated while those before were read.
                let missed: Vec<_> = next.older.difference(&between.known).cloned().collect();
                if !missed.is_empty() {
                    between.known.extend(missed.iter().cloned());
                    between.names.extend(missed);
                    continue;
                }
                *self = next;
            }
            // Asked before reading: what was written before the file was replaced is read here.
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
                Step::Data => return Ok(Step::Data),
                Step::Dry { .. } if over => {
                    self.between = Some(self.since());
                }
                Step::Dry { .. } => return Ok(Step::Dry { rotating: other }),
            }
        }
    }

    /// Files that were rotated after this one, oldest first, under the names they have now.
    fn since(&self) -> Between {
        let all = rotated(&self.dir, &self.name);
        let known = all.iter().map(|name| plain(name).to_owned()).collect();
        let mut newer: Vec<String> =
            all.into_iter().filter(|name| !self.older.contains(plain(name))).collect();
        newer.sort_by(|a, b| plain(a).cmp(plain(b)));
        // One that is being compressed is there twice for a moment.
        newer.dedup_by(|a, b| plain(a) == plain(b));
        let own = newer.iter().position(|name| self.is_own(Path::new(name)));
        // Without it, it was deleted already, and all there are came after it.
        Between { open: None, names: newer.split_off(own.map_or(0, |i| i.saturating_add(1))).into(), known }
    }

    /// Whether a rotated file is the one that is open here: the same, or compressed from it.
    fn is_own(&self, path: &Path) -> bool {
        if !is_compressed(path) {
            return self.dir.stat(path).is_ok_and(|s| s.st_ino == self.inode);
        }
        let same = || -> io::Result<bool> {
            let mut file = self.dir.read(path)?;
            file.seek(SeekFrom::End(-4))?;
            let mut size = [0; 4];
            file.read_exact(&mut size)?;
            // RFC 1952: the last four bytes are the length of what was compressed.
            if u64::from(u32::from_le_bytes(size)) != self.file.metadata()?.len() & u64::from(u32::MAX) {
                return Ok(false);
            }
            // Each line begins with its time: no two files begin alike.
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

/// Names of the rotated files of a log, as they were before any was compressed.
fn plain_names(dir: &Dir, name: &str) -> BTreeSet<String> {
    rotated(dir, name).iter().map(|name| plain(name).to_owned()).collect()
}

/// Names of the rotated files of a log.
fn rotated(dir: &Dir, name: &str) -> BTreeSet<String> {
    let prefix = format!("{name}.");
    let names = dir.names().into_iter().flatten();
    names
        .filter_map(|name| name.into_string().ok())
        .filter(|n| n.starts_with(&prefix) && !n.ends_with(".tmp"))
        .collect()
}

/// Reads the files in between, one after the other; 0 when all are read.
fn fill_from(between: &mut Between, dir: &Dir, block: &mut Vec<u8>) -> io::Result<usize> {
    loop {
        if let Some(file) = &mut between.open {
            let read = fill(file, block)?;
            if read > 0 {
                return Ok(read);
            }
        }
        let Some(name) = between.names.pop_front() else { return Ok(0) };
        // Deleted meanwhile: what was in it is lost to everybody.
        between.open = open_rotated(dir, &name);
    }
}

/// Opened under its plain name first: it may be compressed at any moment.
fn open_rotated(dir: &Dir, name: &str) -> Option<Rotated> {
    let bare = plain(name);
    if let Ok(file) = dir.read(Path::new(bare)) {
        return Some(Rotated::Plain(file));
    }
    let file = dir.read(Path::new(&format!("{bare}{GZ}"))).ok()?;
    Some(Rotated::Compressed(Box::new(GzDecoder::new(file))))
}

fn fill(from: &mut impl Read, block: &mut Vec<u8>) -> io::Result<usize> {
    block.resize(BLOCK, 0);
    let read = from.read(block);
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

        /// As the node does it; the older files are compressed.
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
            let to = self.dir.path().join(format!("0.log.{time:04}"));
            std::fs::rename(self.path(), &to).unwrap();
            std::fs::write(self.path(), "").unwrap();
            to
        }
    }

    /// Reads what there is; whether a rotation is under way.
    fn read(followed: &mut Followed, now: Instant, text: &mut Vec<u8>) -> bool {
        let mut block = Vec::new();
        loop {
            match followed.read(now, &mut block).unwrap() {
                Step::Data => text.extend_from_slice(&block),
                Step::Dry { rotating } => return rotating,
            }
        }
    }

    fn numbers(text: &[u8]) -> Vec<u32> {
        String::from_utf8_lossy(text).lines().map(|l| l.parse().unwrap()).collect()
    }

    #[test]
    fn what_is_written_to_a_rotated_file_for_a_moment_comes_before_what_is_in_the_new_one() {
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
    fn a_reader_that_slept_through_rotations_reads_every_file_that_is_still_there_once() {
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
    fn what_is_rotated_while_files_in_between_are_read_is_read_too() {
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
        assert_eq!(followed.read(now + LINGER, &mut block).unwrap(), Step::Data);
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
    fn one_file_alone_is_read_whatever_has_its_name_and_only_if_it_is_a_file() {
        let mut log = Log::new();
        log.write();
        let mut followed = Followed::open(&log.path(), Some(1)).unwrap();
        log.rotate(1, 3);
        log.write();
        let mut block = Vec::new();
        assert_eq!(followed.read_here(&mut block).unwrap(), Step::Data);
        assert_eq!(block, b"1\n");
        assert_eq!(followed.read_here(&mut block).unwrap(), Step::Dry { rotating: false });
        let error = Followed::open(log.dir.path(), None).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn no_link_is_followed_to_the_log_or_to_what_takes_its_name() {
        let now = Instant::now();
        let mut log = Log::new();
        let outside = tempfile::tempdir().unwrap();
        let secret = outside.path().join("0.log");
        std::fs::write(&secret, "99\n").unwrap();
        let link = |name: &str, to: &Path| std::os::unix::fs::symlink(to, log.dir.path().join(name)).unwrap();
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
