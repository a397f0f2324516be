//! A log file that is followed through its rotations.
//!
//! A rotation gives the file another name, then the runtime makes a new one; for a moment it still writes to the old. Later
//! rotations compress and delete what was rotated before. Whoever reads on finds the files between the one it has open and
//! the newest by their names, which are times.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use flate2::read::GzDecoder;
use tokio::time::Instant;

use crate::error::Error;

/// Read at once.
const BLOCK: usize = 64 << 10;

/// By so many bytes files of one log are told apart.
const HEAD: u64 = 4096;

/// The runtime may write to a rotated file so long after there is a new one: it has to swap the two and to flush.
pub(super) const LINGER: Duration = Duration::from_millis(250);

/// One log file being read.
pub(super) struct Followed {
    pub(super) path: PathBuf,
    file: File,
    inode: u64,
    position: u64,
    /// Rotated files that were there when this one was opened: older than it.
    older: BTreeSet<String>,
    /// Since when another file has its name.
    replaced: Option<Instant>,
}

impl Followed {
    pub(super) fn open(path: &Path, tail: Option<usize>) -> Result<Self, Error> {
        let action = || format!("read {}", path.display());
        // Listed before: what is rotated from now on is this file or a newer one.
        let older = rotated(path);
        let mut file = File::open(path).map_err(Error::os(action()))?;
        let inode = file.metadata().map_err(Error::os(action()))?.ino();
        let position = match tail {
            Some(lines) => tail_start(&mut file, lines).map_err(Error::os(action()))?,
            None => 0,
        };
        Ok(Self { path: path.to_owned(), file, inode, position, older, replaced: None })
    }

    /// Gives what was added to `take`; whether there was anything.
    pub(super) fn read_on(
        &mut self,
        take: &mut impl FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<bool, Error> {
        let failed = || format!("read {}", self.path.display());
        let len = self.file.metadata().map_err(Error::os(failed()))?.len();
        if len < self.position {
            // Truncated: it begins anew.
            self.position = 0;
        }
        self.file.seek(SeekFrom::Start(self.position)).map_err(Error::os(failed()))?;
        let read = copy(&mut self.file, take).map_err(|e| e.reading(failed()))?;
        self.position += read;
        Ok(read > 0)
    }

    /// Gives what was added here and in files that took this one's name since. Whether a rotation is still to be waited
    /// for: look again soon.
    pub(super) fn read_through(
        &mut self,
        now: Instant,
        take: &mut impl FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<bool, Error> {
        let other = std::fs::metadata(&self.path).is_ok_and(|m| m.ino() != self.inode);
        // Asked before reading: what was written before the file was replaced is read here.
        let over = match (other, self.replaced) {
            (false, _) => false,
            (true, None) => {
                self.replaced = Some(now);
                false
            }
            (true, Some(since)) => now.duration_since(since) >= LINGER,
        };
        self.read_on(take)?;
        if !over {
            return Ok(other);
        }
        let since = self.since();
        for name in since {
            // Deleted meanwhile: what was in it is lost to everybody.
            let _ = whole(&self.path.with_file_name(name), take)?;
        }
        // Gone again already: the next look finds the next.
        if let Ok(mut next) = Self::open(&self.path, None) {
            next.read_on(take)?;
            *self = next;
        }
        Ok(false)
    }

    /// Files that were rotated after this one, oldest first, under the names they have now.
    fn since(&self) -> Vec<String> {
        let mut newer: Vec<String> =
            rotated(&self.path).into_iter().filter(|name| !self.older.contains(plain(name))).collect();
        newer.sort_by(|a, b| plain(a).cmp(plain(b)));
        // One that is being compressed is there twice for a moment.
        newer.dedup_by(|a, b| plain(a) == plain(b));
        let own = newer.iter().position(|name| self.is_own(&self.path.with_file_name(name)));
        // Without it, it was deleted already, and all there are came after it.
        newer.split_off(own.map_or(0, |i| i + 1))
    }

    /// Whether a rotated file is the one that is open here: the same, or compressed from it.
    fn is_own(&self, path: &Path) -> bool {
        if !is_compressed(path) {
            return std::fs::metadata(path).is_ok_and(|m| m.ino() == self.inode);
        }
        let same = || -> std::io::Result<bool> {
            let mut file = File::open(path)?;
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

/// Names of the rotated files of a log.
fn rotated(path: &Path) -> BTreeSet<String> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name().and_then(|n| n.to_str())) else {
        return BTreeSet::new();
    };
    let prefix = format!("{name}.");
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter_map(|e| e.file_name().into_string().ok())
        .filter(|n| n.starts_with(&prefix) && !n.ends_with(".tmp"))
        .collect()
}

/// Gives a rotated file; false if it is gone. Opened under its plain name first: it may be compressed at any moment.
fn whole(path: &Path, take: &mut impl FnMut(&[u8]) -> Result<(), Error>) -> Result<bool, Error> {
    let failed = || format!("read {}", path.display());
    let bare = if is_compressed(path) { path.with_extension("") } else { path.to_owned() };
    if let Ok(mut file) = File::open(&bare) {
        return copy(&mut file, take).map(|_| true).map_err(|e| e.reading(failed()));
    }
    let mut name = bare.into_os_string();
    name.push(GZ);
    let Ok(file) = File::open(PathBuf::from(name)) else { return Ok(false) };
    copy(&mut GzDecoder::new(file), take).map(|_| true).map_err(|e| e.reading(failed()))
}

enum Copy {
    Read(std::io::Error),
    Take(Error),
}

impl Copy {
    fn reading(self, action: String) -> Error {
        match self {
            Self::Read(source) => Error::Os { action, source },
            Self::Take(error) => error,
        }
    }
}

fn copy(from: &mut impl Read, take: &mut impl FnMut(&[u8]) -> Result<(), Error>) -> Result<u64, Copy> {
    let mut block = vec![0; BLOCK];
    let mut read = 0;
    loop {
        let n = from.read(&mut block).map_err(Copy::Read)?;
        if n == 0 {
            return Ok(read);
        }
        read += n as u64;
        take(&block[..n]).map_err(Copy::Take)?;
    }
}

/// Where the last `lines` lines of a file begin.
///
/// # Errors
/// It cannot be read.
pub(super) fn tail_start(file: &mut (impl Read + Seek), lines: usize) -> std::io::Result<u64> {
    let len = file.seek(SeekFrom::End(0))?;
    let mut end = len;
    let mut found = 0;
    while end > 0 {
        let start = end.saturating_sub(BLOCK as u64);
        let mut block = vec![0; usize::try_from(end - start).unwrap_or(0)];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(&mut block)?;
        for (i, _) in block.iter().enumerate().rev().filter(|(_, b)| **b == b'\n') {
            let after = start + i as u64 + 1;
            // The newline at the end closes the last line.
            if after < len || lines == 0 {
                found += 1;
                if found >= lines.max(1) {
                    return Ok(after);
                }
            }
        }
        end = start;
    }
    Ok(if lines == 0 { len } else { 0 })
}

#[cfg(test)]
mod tests {
    use std::io::{Cursor, Write as _};

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
            let mut old: Vec<_> = rotated(&self.path()).into_iter().collect();
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

    fn read(followed: &mut Followed, now: Instant, text: &mut Vec<u8>) -> bool {
        followed
            .read_through(now, &mut |bytes| {
                text.extend_from_slice(bytes);
                Ok(())
            })
            .unwrap()
    }

    fn numbers(text: &[u8]) -> Vec<u32> {
        String::from_utf8_lossy(text).lines().map(|l| l.parse().unwrap()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_written_to_a_rotated_file_for_a_moment_comes_before_what_is_in_the_new_one() {
        let mut log = Log::new();
        let mut text = Vec::new();
        let mut followed = Followed::open(&log.path(), None).unwrap();
        log.write();
        let old = log.rotate(1, 3);
        assert!(read(&mut followed, Instant::now(), &mut text), "look again soon");
        log.write_to(&old);
        tokio::time::advance(LINGER).await;
        log.write();
        assert!(!read(&mut followed, Instant::now(), &mut text));
        log.write();
        assert!(!read(&mut followed, Instant::now(), &mut text));
        assert_eq!(numbers(&text), [1, 2, 3, 4]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_slept_through_rotations_reads_every_file_that_is_still_there_once() {
        for (rotations, keep, lost) in [(1, 3, 0), (2, 3, 0), (4, 3, 0), (4, 0, 2), (6, 2, 2)] {
            let mut log = Log::new();
            log.write();
            log.rotate(0, keep);
            log.write();
            let mut followed = Followed::open(&log.path(), None).unwrap();
            let mut text = Vec::new();
            read(&mut followed, Instant::now(), &mut text);
            for time in 1..=rotations {
                log.write();
                log.rotate(time, keep);
                log.write();
            }
            read(&mut followed, Instant::now(), &mut text);
            tokio::time::advance(LINGER).await;
            read(&mut followed, Instant::now(), &mut text);
            let found = numbers(&text);
            assert!(found.is_sorted_by(|a, b| a < b), "{rotations} {keep}: {found:?}");
            // The line before the follower came is of the file before.
            let all = usize::try_from(log.written).unwrap() - 1;
            assert_eq!(all - found.len(), lost * 2, "{rotations} rotations, {keep} kept: {found:?}");
        }
    }

    #[test]
    fn the_last_lines_are_found_from_the_end() {
        let long = "x".repeat(100_000);
        let text = format!("first\n{long}\nthird\nlast\n");
        for (lines, want) in
            [(0, ""), (1, "last\n"), (2, "third\nlast\n"), (4, text.as_str()), (9, text.as_str())]
        {
            let at = tail_start(&mut Cursor::new(text.as_bytes()), lines).unwrap();
            assert_eq!(&text[usize::try_from(at).unwrap()..], want, "{lines} lines");
        }
        assert_eq!(tail_start(&mut Cursor::new(b"a\nunfinished"), 1).unwrap(), 2);
        assert_eq!(tail_start(&mut Cursor::new(b""), 3).unwrap(), 0);
    }
}
