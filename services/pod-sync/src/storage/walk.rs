//! What a directory takes on its file system, as `du` counts it (pkg/volume/util/fs): blocks and inodes, hard links once, other
//! file systems left out.
//!
//! The tree belongs to a pod, which may change it meanwhile and nest it as deep as it likes.

use std::collections::HashSet;
use std::io;
use std::path::Path;

use quintlet_kit::tree::{self, Entry, Visitor};
use rustix::fs::{AtFlags, CWD, Stat, statat};

/// `st_blocks` counts these, whatever the file system has.
const BLOCK: u64 = 512;
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
        let bytes = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(BLOCK);
        self.usage.bytes = self.usage.bytes.saturating_add(bytes);
        self.usage.inodes = self.usage.inodes.saturating_add(1);
        true
    }
}

/// A count that asks before each file.
struct Counting<S> {
    count: Count,
    step: S,
}

impl<S: FnMut() -> io::Result<()>> Visitor for Counting<S> {
    fn entry(&mut self, entry: Entry<'_>) -> io::Result<bool> {
        (self.step)()?;
        Ok(self.count.add(entry.stat, entry.is_dir()))
    }
}

/// Counts what is at `place`. `step` is called for each file: it may take its time, and an error of it ends the count.
///
/// # Errors
/// The file system's, that of `step`, or a directory deep in the tree was moved while it was counted.
pub(super) fn usage(place: &Path, step: impl FnMut() -> io::Result<()>) -> io::Result<Usage> {
    let stat = statat(CWD, place, AtFlags::SYMLINK_NOFOLLOW)?;
    let mut count = Count { device: stat.st_dev, usage: Usage::default(), linked: HashSet::new() };
    let is_dir = tree::is_dir(&stat);
    count.add(&stat, is_dir);
    let mut counting = Counting { count, step };
    if is_dir {
        tree::walk(tree::open_root(place)?, &mut counting)?;
    }
    Ok(counting.count.usage)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use rustix::fs::{Mode, OFlags, openat};

    use super::*;

    const HOW: OFlags = OFlags::DIRECTORY.union(OFlags::CLOEXEC);

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
        for _ in 0..1000 {
            rustix::fs::mkdirat(&at, deep.as_str(), Mode::RWXU).unwrap();
            at = openat(&at, deep.as_str(), HOW, Mode::empty()).unwrap();
        }
        assert_eq!(counted(dir.path()).inodes, 1001);
        tree::remove(&dir.path().join(deep)).unwrap();
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
