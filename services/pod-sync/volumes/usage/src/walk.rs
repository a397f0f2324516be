//! Usage of a directory, as `du` counts it (pkg/volume/util/fs): blocks and inodes, hard links once, without
//! other file systems.
//!
//! The tree belongs to a pod, which may change it concurrently and nest it to any depth.

use std::collections::HashSet;
use std::io;
use std::path::Path;

use quintlet_kit::tree::{self, DirEntry, Visitor};
use rustix::fs::{AtFlags, CWD, Stat, statat};

/// Unit of `st_blocks` in bytes, on any file system.
const BLOCK: u64 = 512;
/// Inodes with several links that are remembered (16 MiB). Links of further inodes are counted each.
const LINKS: usize = 1 << 20;

/// Usage of a tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Usage {
    /// Bytes on disk, without holes.
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
    /// Counts a file. Returns whether it is on the file system of the tree.
    fn add(&mut self, stat: &Stat, is_dir: bool) -> bool {
        if stat.st_dev != self.device {
            return false;
        }
        // The links of a directory are its subdirectories.
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

/// A count that calls `step` before each file.
struct Counting<S> {
    count: Count,
    step: S,
}

impl<S: FnMut() -> io::Result<()>> Visitor for Counting<S> {
    fn entry(&mut self, entry: DirEntry<'_>) -> io::Result<bool> {
        (self.step)()?;
        Ok(self.count.add(entry.stat, entry.is_dir()))
    }
}

/// Counts the usage of `place`. `step` is called for each file; it may block, and an error ends the count.
///
/// # Errors
/// An error of the file system or of `step`, or a directory was moved during the count.
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
        let allocated = |place: &&Path| fs::symlink_metadata(place).unwrap().blocks() * BLOCK;
        Usage { bytes: places.iter().map(allocated).sum(), inodes: places.len() as u64 }
    }

    #[test]
    fn blocks_are_counted_and_hard_links_once() {
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
    fn a_tree_deeper_than_the_longest_path_is_counted() {
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
    fn an_error_of_the_step_ends_the_count() {
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
