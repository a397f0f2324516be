//! What a directory takes on its file system, as `du` counts it (pkg/volume/util/fs): blocks and inodes, hard links once, other
//! file systems left out.
//!
//! The tree is a pod's, which may change it meanwhile: it is gone through by open directories, and no link is followed.

use std::collections::HashSet;
use std::io;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, openat, statat};
use rustix::io::Errno;

/// `st_blocks` counts these, whatever the file system has.
const BLOCK: u64 = 512;
/// Directories inside one another; each is open while what is in it is counted, and a process may have but so many files open.
const DEEPEST: usize = 256;
/// Files with several names that are kept in mind, 16 MiB of them. Names of further ones count each.
const LINKS: usize = 1 << 20;

/// What a tree takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Usage {
    /// Bytes on the disk, holes left out.
    pub bytes: u64,
    /// Files, directories and links.
    pub inodes: u64,
}

struct Count {
    device: u64,
    usage: Usage,
    linked: HashSet<u64>,
}

impl Count {
    /// Counts a file; whether it belongs to the tree.
    fn add(&mut self, stat: &Stat, is_dir: bool) -> bool {
        if stat.st_dev != self.device {
            return false;
        }
        // A directory has as many links as directories in it, and one place.
        if !is_dir && stat.st_nlink > 1 {
            if self.linked.contains(&stat.st_ino) {
                return true;
            }
            if self.linked.len() < LINKS {
                self.linked.insert(stat.st_ino);
            }
        }
        self.usage.bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * BLOCK;
        self.usage.inodes += 1;
        true
    }
}

/// Counts what is at `place`. `step` is called for each file: it may take its time, and an error of it ends the count.
///
/// # Errors
/// The file system's, that of `step`, or the tree is deeper than 256 directories.
pub(super) fn usage(place: &Path, mut step: impl FnMut() -> io::Result<()>) -> io::Result<Usage> {
    let stat = statat(CWD, place, AtFlags::SYMLINK_NOFOLLOW)?;
    let mut count = Count { device: stat.st_dev, usage: Usage::default(), linked: HashSet::new() };
    let is_dir = is_dir(&stat);
    count.add(&stat, is_dir);
    let mut open: Vec<Dir> = Vec::new();
    if is_dir {
        open.extend(directory(openat(CWD, place, HOW, Mode::empty()))?);
    }
    loop {
        let depth = open.len();
        let Some(dir) = open.last_mut() else { return Ok(count.usage) };
        let Some(entry) = dir.read() else {
            open.pop();
            continue;
        };
        let entry = match entry {
            Ok(entry) => entry,
            // Removed while it was read.
            Err(Errno::NOENT) => {
                open.pop();
                continue;
            }
            Err(e) => return Err(e.into()),
        };
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        step()?;
        let stat = match statat(dir.fd()?, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => continue,
            Err(e) => return Err(e.into()),
        };
        let is_dir = self::is_dir(&stat);
        if !count.add(&stat, is_dir) || !is_dir {
            continue;
        }
        if depth == DEEPEST {
            return Err(io::Error::other("directories too deep inside one another"));
        }
        let below = openat(dir.fd()?, name, HOW, Mode::empty());
        open.extend(directory(below)?);
    }
}

const HOW: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn is_dir(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

/// What was opened; none if it is no directory any more.
fn directory(opened: Result<rustix::fd::OwnedFd, Errno>) -> io::Result<Option<Dir>> {
    match opened {
        Ok(fd) => Ok(Some(Dir::new(fd)?)),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use super::*;

    fn counted(place: &Path) -> Usage {
        usage(place, || Ok(())).unwrap()
    }

    /// Blocks and inodes of these, without what is in them.
    fn sum(places: &[&Path]) -> Usage {
        let of = |place: &&Path| fs::symlink_metadata(place).unwrap().blocks() * BLOCK;
        Usage { bytes: places.iter().map(of).sum(), inodes: places.len() as u64 }
    }

    #[test]
    fn blocks_are_counted_and_a_file_of_several_names_once() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("a/b")).unwrap();
        fs::write(at("a/b/large"), vec![1; 100_000]).unwrap();
        fs::hard_link(at("a/b/large"), at("a/again")).unwrap();
        fs::File::create(at("hole")).unwrap().set_len(1 << 30).unwrap();
        symlink("/usr", at("elsewhere")).unwrap();
        let all = [at("a"), at("a/b"), at("a/b/large"), at("hole"), at("elsewhere")];
        let mut places: Vec<&Path> = all.iter().map(std::path::PathBuf::as_path).collect();
        places.push(dir.path());
        let want = sum(&places);
        assert_eq!(counted(dir.path()), want);
        assert!((100_000..1 << 20).contains(&want.bytes), "neither the hole nor /usr: {want:?}");
        assert_eq!(counted(&at("a/b/large")).inodes, 1, "a file alone");
    }

    #[test]
    fn what_is_deeper_than_a_path_can_say_is_counted_too() {
        let dir = tempfile::tempdir().unwrap();
        let deep = "x".repeat(200);
        let mut at = openat(CWD, dir.path(), HOW, Mode::empty()).unwrap();
        for _ in 0..40 {
            rustix::fs::mkdirat(&at, deep.as_str(), Mode::RWXU).unwrap();
            at = openat(&at, deep.as_str(), HOW, Mode::empty()).unwrap();
        }
        assert_eq!(counted(dir.path()).inodes, 41);
    }

    #[test]
    fn an_error_of_the_step_ends_it() {
        let dir = tempfile::tempdir().unwrap();
        for n in 0..10 {
            fs::write(dir.path().join(n.to_string()), "").unwrap();
        }
        let mut left = 3;
        let step = || {
            left -= 1;
            if left == 0 { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
        };
        assert_eq!(usage(dir.path(), step).unwrap_err().kind(), io::ErrorKind::Interrupted);
    }
}
