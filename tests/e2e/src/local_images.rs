//! Archives of the local images, made once for all tests of a build: a compiler and hashes take longer than
//! their import.

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use quintlet_localnode::{host, images};

use crate::bins;

/// Returns the archives of all local images.
///
/// # Panics
/// They cannot be made.
pub(crate) fn archives() -> Vec<Vec<u8>> {
    let kept = directory();
    if let Some(archives) = read(&kept) {
        return archives;
    }
    let archives = images::local_archives().expect("the local images are made");
    keep(&kept, &archives).expect("the archives can be written beside the binaries");
    archives
}

/// Returns a directory of this test program, whose name changes with its build and with the machine's
/// busybox.
fn directory() -> PathBuf {
    let modified = |path: &Path| {
        let time =
            std::fs::metadata(path).and_then(|metadata| metadata.modified()).expect("a program has a time");
        time.duration_since(UNIX_EPOCH).expect("programs are newer than 1970").as_nanos()
    };
    let busybox = host::find_program("busybox").expect("busybox is installed");
    let exe = std::env::current_exe().expect("a running process has an executable");
    let name = exe.file_name().expect("an executable is a file");
    let stamp = format!("{}-{}", modified(&exe), modified(&busybox));
    bins::profile_dir().join("e2e-images").join(name).join(stamp)
}

/// Returns `None` if the archives were not made yet.
fn read(dir: &Path) -> Option<Vec<Vec<u8>>> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path()).collect();
    files.sort();
    files.iter().map(std::fs::read).collect::<Result<_, _>>().ok()
}

/// Writes the archives under another name first, since other tests may read or write them.
fn keep(dir: &Path, archives: &[Vec<u8>]) -> std::io::Result<()> {
    let all = dir.parent().unwrap_or(dir);
    std::fs::create_dir_all(all)?;
    for other in std::fs::read_dir(all)?.flatten().map(|entry| entry.path()) {
        // A directory that another test is about to rename begins with a dot.
        let is_new = other.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        if other != dir && !is_new {
            let _gone = std::fs::remove_dir_all(other);
        }
    }
    let new = tempfile::Builder::new().prefix(".new-").tempdir_in(all)?;
    for (at, archive) in archives.iter().enumerate() {
        std::fs::write(new.path().join(at.to_string()), archive)?;
    }
    // Another test may have written the same meanwhile.
    let _exists = std::fs::rename(new.path(), dir);
    Ok(())
}
