//! Changes `/etc/projects` and `/etc/projid` under the locks of both, as the kubelet and `xfs_quota` users
//! expect them.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use quintlet_kit::atomic_file;
use rustix::fs::{FlockOperation, OFlags, flock};

use super::projects::Projects;

/// Mode of files that did not exist.
const MODE: u32 = 0o644;
/// Attempts to lock a file that others replace.
const MAX_LOCKS: u32 = 10;
/// Longest content that is read.
const MAX_BYTES: u64 = 16 << 20;

/// The two files.
#[derive(Debug, Clone)]
pub(super) struct ProjectFiles {
    directories: PathBuf,
    names: PathBuf,
}

impl ProjectFiles {
    /// Returns the files in `etc`.
    pub(super) fn below(etc: &Path) -> Self {
        Self { directories: etc.join("projects"), names: etc.join("projid") }
    }

    /// Reads both files. Missing files are empty.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(super) fn read(&self) -> io::Result<Projects> {
        let text = |path: &Path| match open(path, false) {
            Ok(mut file) => content(&mut file),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            Err(e) => Err(e),
        };
        Ok(Projects::parse(&text(&self.directories)?, &text(&self.names)?))
    }

    /// Changes both files. They are written only if `change` returns a value and changed something.
    ///
    /// # Errors
    /// A file cannot be locked, read or written, or is not a plain file.
    pub(super) fn update<T>(&self, change: impl FnOnce(&mut Projects) -> Option<T>) -> io::Result<Option<T>> {
        let (mut directories, mut names) = (lock(&self.directories)?, lock(&self.names)?);
        let before = Projects::parse(&content(&mut directories)?, &content(&mut names)?);
        let mut projects = before.clone();
        let Some(done) = change(&mut projects) else { return Ok(None) };
        if projects != before {
            let [text, text_of_names] = projects.texts();
            // A name without a directory reserves its ID, so it is written first.
            replace(&self.names, &names, &text_of_names)?;
            replace(&self.directories, &directories, &text)?;
        }
        Ok(Some(done))
    }
}

fn open(path: &Path, create: bool) -> io::Result<File> {
    let flags = (OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK).bits();
    let flags = i32::try_from(flags).map_err(io::Error::other)?;
    let file =
        File::options().read(true).write(create).create(create).mode(MODE).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other(format!("{} is not a plain file", path.display())))
    }
}

/// Opens and locks a file that stays at its path while it is locked.
fn lock(path: &Path) -> io::Result<File> {
    for _ in 0..MAX_LOCKS {
        let file = open(path, true)?;
        // Another program may keep the lock for long, and pods must not wait for it.
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        let (own, there) = (file.metadata()?, std::fs::symlink_metadata(path)?);
        if (own.dev(), own.ino()) == (there.dev(), there.ino()) {
            return Ok(file);
        }
    }
    Err(io::Error::other(format!("{} is replaced all the time", path.display())))
}

fn content(file: &mut File) -> io::Result<String> {
    let mut text = String::new();
    file.take(MAX_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

fn replace(path: &Path, locked: &File, text: &str) -> io::Result<()> {
    let mode = locked.metadata()?.mode() & 0o777;
    atomic_file::write_durable(path, text.as_bytes(), mode)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn both_files_are_changed_together_and_keep_their_modes() {
        let etc = tempfile::tempdir().unwrap();
        let at = |name: &str| etc.path().join(name);
        let files = ProjectFiles::below(etc.path());
        assert_eq!(files.read().unwrap(), Projects::default(), "files may be missing");
        fs::write(at("projects"), "1:/a\n").unwrap();
        fs::set_permissions(at("projects"), fs::Permissions::from_mode(0o600)).unwrap();
        let id = files.update(|projects| projects.assign(Path::new("/b"), |_| false)).unwrap();
        assert_eq!(id, Some(1_048_577));
        assert_eq!(fs::read_to_string(at("projects")).unwrap(), "1:/a\n1048577:/b\n");
        assert_eq!(fs::read_to_string(at("projid")).unwrap(), "volume1048577:1048577\n");
        let mode = |name: &str| fs::metadata(at(name)).unwrap().mode() & 0o777;
        assert_eq!((mode("projects"), mode("projid")), (0o600, 0o644));
        assert_eq!(files.update(|projects| projects.assign(Path::new("/c"), |_| true)).unwrap(), None);
        assert_eq!(files.read().unwrap().id_of(Path::new("/b")), Some(1_048_577));
    }

    #[test]
    fn a_link_or_a_locked_file_is_an_error_and_is_left_alone() {
        let etc = tempfile::tempdir().unwrap();
        let files = ProjectFiles::below(etc.path());
        let assign = || files.update(|projects| projects.assign(Path::new("/b"), |_| false));
        fs::write(etc.path().join("elsewhere"), "").unwrap();
        symlink(etc.path().join("elsewhere"), etc.path().join("projid")).unwrap();
        assert!(assign().is_err());
        assert_eq!(fs::read_to_string(etc.path().join("elsewhere")).unwrap(), "");
        fs::remove_file(etc.path().join("projid")).unwrap();
        let held = lock(&etc.path().join("projects")).unwrap();
        assert!(assign().is_err());
        drop(held);
        assert!(assign().unwrap().is_some());
    }
}
