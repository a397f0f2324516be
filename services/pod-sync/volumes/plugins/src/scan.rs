//! Reads the registration directory.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// Largest number of entries that are read below the registration directory.
const MOST_ENTRIES: usize = 4096;

/// Identity of a socket: a socket that is removed and created again under the same path has another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SocketId {
    device: u64,
    inode: u64,
    /// Time of creation in seconds and nanoseconds. The time of modification does not change with mode or
    /// owner.
    created: (i64, i64),
}

#[cfg(test)]
impl SocketId {
    pub(crate) fn of(inode: u64) -> Self {
        Self { device: 1, inode, created: (0, 0) }
    }
}

/// Reason why an entry of the registration directory is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A symbolic link, even one to a socket: the owner of the target's directory can change the target.
    #[error("{} is a symbolic link, plugins must create their socket in the registration directory", .0.display())]
    Link(PathBuf),
    /// A regular file, device or FIFO.
    #[error("{} is not a socket", .0.display())]
    NotSocket(PathBuf),
    /// A socket of a user other than root and the user of this process.
    #[error("{} belongs to uid {uid}, plugins must run as root", .path.display())]
    Owner {
        /// The socket.
        path: PathBuf,
        /// UID of the owner.
        uid: u32,
    },
    /// The directory has too many entries; those after the first 4096 are ignored.
    #[error("{} has more than {MOST_ENTRIES} entries, the others are ignored", .0.display())]
    TooMany(PathBuf),
    /// A directory or entry cannot be read.
    #[error("failed to read {}: {message}", .path.display())]
    Unreadable {
        /// Path of the entry.
        path: PathBuf,
        /// The error of the operating system.
        message: String,
    },
}

/// The content of the registration directory.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Scan {
    /// Sockets of plugins.
    pub sockets: BTreeMap<PathBuf, SocketId>,
    /// Entries that are not used.
    pub refused: BTreeMap<PathBuf, Refusal>,
}

/// Reads the directory and those below it, without following links. Names with a leading dot are skipped:
/// plugins create their sockets under such names before they rename them. Blocks.
///
/// # Errors
/// Fails if the directory itself cannot be read. A directory that does not exist is empty.
pub(crate) fn scan(root: &Path) -> io::Result<Scan> {
    let mut scan = Scan::default();
    let own = nix::unistd::geteuid().as_raw();
    let mut left = MOST_ENTRIES;
    let mut directories = vec![root.to_owned()];
    while let Some(dir) = directories.pop() {
        let entries = match fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) if dir == root => return Err(error),
            Err(error) => {
                scan.refuse(Refusal::Unreadable { path: dir.clone(), message: error.to_string() }, dir);
                continue;
            }
        };
        for entry in entries.flatten() {
            let Some(rest) = left.checked_sub(1) else {
                scan.refuse(Refusal::TooMany(root.to_owned()), root.to_owned());
                return Ok(scan);
            };
            left = rest;
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let path = entry.path();
            // `DirEntry::metadata` does not follow links.
            match entry.metadata() {
                Ok(meta) if meta.is_dir() => directories.push(path),
                Ok(meta) if meta.is_symlink() => scan.refuse(Refusal::Link(path.clone()), path),
                Ok(meta) if !meta.file_type().is_socket() => {
                    scan.refuse(Refusal::NotSocket(path.clone()), path);
                }
                Ok(meta) if meta.uid() != 0 && meta.uid() != own => {
                    scan.refuse(Refusal::Owner { path: path.clone(), uid: meta.uid() }, path);
                }
                Ok(meta) => {
                    let created = (meta.mtime(), meta.mtime_nsec());
                    scan.sockets.insert(path, SocketId { device: meta.dev(), inode: meta.ino(), created });
                }
                // The entry was removed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    let refusal = Refusal::Unreadable { path: path.clone(), message: error.to_string() };
                    scan.refuse(refusal, path);
                }
            }
        }
    }
    Ok(scan)
}

impl Scan {
    fn refuse(&mut self, refusal: Refusal, path: PathBuf) {
        self.refused.insert(path, refusal);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn sockets_are_found_at_any_depth_and_everything_else_is_refused_by_name() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("registry");
        fs::create_dir_all(dir.join("a/b")).unwrap();
        fs::create_dir(dir.join(".hidden")).unwrap();
        let elsewhere = temp.path().join("elsewhere.sock");
        let sockets =
            [dir.join("one.sock"), dir.join("a/b/two.sock"), dir.join(".tmp.sock"), elsewhere.clone()];
        let _listening: Vec<_> = sockets.iter().map(|path| UnixListener::bind(path).unwrap()).collect();
        UnixListener::bind(dir.join(".hidden/three.sock")).unwrap();
        fs::write(dir.join("file"), "").unwrap();
        std::os::unix::fs::symlink(&elsewhere, dir.join("link.sock")).unwrap();
        std::os::unix::fs::symlink(temp.path(), dir.join("loop")).unwrap();
        let found = scan(&dir).unwrap();
        let names: Vec<&Path> = found.sockets.keys().map(PathBuf::as_path).collect();
        assert_eq!(names, [dir.join("a/b/two.sock"), dir.join("one.sock")]);
        let refused: Vec<String> = found.refused.values().map(ToString::to_string).collect();
        assert_eq!(refused.len(), 3, "{refused:?}");
        assert!(refused[0].ends_with("file is not a socket"), "{refused:?}");
        assert!(refused[1].contains("link.sock is a symbolic link"), "{refused:?}");
        assert!(refused[2].contains("loop is a symbolic link"), "{refused:?}");
    }

    #[test]
    fn a_socket_of_another_user_is_refused() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("theirs.sock");
        let _listening = UnixListener::bind(&path).unwrap();
        std::os::unix::fs::chown(&path, Some(1000), None).unwrap();
        let found = scan(temp.path()).unwrap();
        assert!(found.sockets.is_empty());
        assert_eq!(found.refused[&path], Refusal::Owner { path: path.clone(), uid: 1000 });
    }

    #[test]
    fn a_socket_that_is_created_again_has_another_identity_and_a_new_mode_changes_nothing() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("p.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let before = scan(temp.path()).unwrap();
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        assert_eq!(scan(temp.path()).unwrap(), before);
        drop(listener);
        fs::remove_file(&path).unwrap();
        // A file of the same age could have the same inode.
        std::thread::sleep(std::time::Duration::from_millis(20));
        let _listener = UnixListener::bind(&path).unwrap();
        assert_ne!(scan(temp.path()).unwrap(), before);
    }

    #[test]
    fn a_directory_that_does_not_exist_is_empty() {
        assert_eq!(scan(Path::new("/nonexistent/registry")).unwrap(), Scan::default());
    }
}
