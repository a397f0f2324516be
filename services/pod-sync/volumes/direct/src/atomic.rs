//! Replaces the files of a volume atomically (`pkg/volume/util: AtomicWriter`).
//!
//! The files are in a directory named by time and a random suffix. `..data` is a link to it, and each visible
//! name is a link through `..data`. A new version is written to another directory, then `..data` is replaced
//! by a rename. A reader sees all old files or all new ones.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _, lchown, symlink};
use std::path::{Component, Path, PathBuf};

use quintlet_kit::failpoint;
use rand::RngExt as _;

const DATA: &str = "..data";
const NEW_DATA: &str = "..data_tmp";
const MAX_PATH: usize = 4096;
const MAX_NAME: usize = 255;

/// A file of a volume.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct FileProjection {
    /// Content. Never printed, since it may be a secret.
    pub(crate) data: Vec<u8>,
    /// Permission bits.
    pub(crate) mode: u32,
    /// Owner; `None` means root.
    pub(crate) owner: Option<u32>,
}

impl std::fmt::Debug for FileProjection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileProjection")
            .field("bytes", &self.data.len())
            .field("mode", &self.mode)
            .field("owner", &self.owner)
            .finish()
    }
}

/// Files by their path in the volume.
pub(crate) type Payload = BTreeMap<String, FileProjection>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum AtomicWriteError {
    /// A path could leave the volume or collide with the writer's own names.
    #[error("invalid path: {0}")]
    Path(String),
    #[error("{what} {path}: {source}")]
    Io {
        /// The failed operation.
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

fn io_error<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> AtomicWriteError + 'a {
    move |source| AtomicWriteError::Io { what, path: path.to_owned(), source }
}

fn clean(path: &str) -> Result<PathBuf, AtomicWriteError> {
    let bad = |why: &str| Err(AtomicWriteError::Path(why.to_owned()));
    if path.is_empty() {
        return bad("must not be empty");
    }
    if path.starts_with('/') {
        return bad(&format!("must be relative path: {path}"));
    }
    if path.len() > MAX_PATH {
        return bad(&format!("must be less than or equal to {MAX_PATH} characters"));
    }
    let mut out = PathBuf::new();
    for part in Path::new(path).components() {
        match part {
            Component::Normal(name) if name.len() > MAX_NAME => {
                return bad(&format!("filename length must be less than or equal to {MAX_NAME}: {path}"));
            }
            Component::Normal(name) => out.push(name),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                return bad(&format!("must not contain '..': {path}"));
            }
        }
    }
    match out.components().next() {
        None => bad("must not be empty"),
        Some(first) if first.as_os_str().to_string_lossy().starts_with("..") => {
            bad(&format!("must not start with '..': {path}"))
        }
        Some(_) => Ok(out),
    }
}

/// Makes `payload` the content of `volume`. Returns whether anything was written: files with equal bytes are
/// not changed, even if their modes differ. `own` runs on the new version before it becomes visible.
///
/// # Errors
/// A path is invalid, or a file operation failed. Readers then see the previous files.
pub(crate) fn write(
    volume: &Path,
    payload: &Payload,
    now: jiff::Timestamp,
    own: impl FnOnce(&Path) -> io::Result<()>,
) -> Result<bool, AtomicWriteError> {
    let files: BTreeMap<PathBuf, &FileProjection> =
        payload.iter().map(|(path, file)| Ok((clean(path)?, file))).collect::<Result<_, _>>()?;
    let data = volume.join(DATA);
    let old = current(&data);
    let old_files = match &old {
        Some(name) => list_files(&volume.join(name)).map_err(io_error("cannot read", volume))?,
        None => BTreeSet::new(),
    };
    let same = old.is_some()
        && old_files.len() == files.len()
        && files.iter().all(|(path, file)| fs::read(data.join(path)).is_ok_and(|bytes| bytes == file.data));
    if same {
        // A crash after the rename may have left links missing.
        link_visible(volume, &files)?;
        return Ok(false);
    }
    let name = new_dir(volume, now)?;
    let dir = volume.join(&name);
    let written = write_files(&dir, &files)
        .and_then(|()| own(volume).map_err(io_error("cannot set the ownership of", volume)))
        .and_then(|()| switch(volume, &name));
    if let Err(e) = written {
        let _ = fs::remove_dir_all(&dir);
        return Err(e);
    }
    link_visible(volume, &files)?;
    remove_visible(volume, &files)?;
    remove_stale(volume, &name);
    Ok(true)
}

/// Returns the directory that `..data` points to; `None` for a link with a foreign target.
fn current(data: &Path) -> Option<PathBuf> {
    let target = fs::read_link(data).ok()?;
    let plain = target.components().count() == 1 && target.to_string_lossy().starts_with("..");
    (plain && target != Path::new("..")).then_some(target)
}

fn list_files(root: &Path) -> io::Result<BTreeSet<PathBuf>> {
    let mut out = BTreeSet::new();
    let mut todo = vec![PathBuf::new()];
    while let Some(dir) = todo.pop() {
        let entries = match fs::read_dir(root.join(&dir)) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound && dir.as_os_str().is_empty() => return Ok(out),
            Err(e) => return Err(e),
        };
        for entry in entries {
            let entry = entry?;
            let path = dir.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                todo.push(path);
            } else {
                out.insert(path);
            }
        }
    }
    Ok(out)
}

fn new_dir(volume: &Path, now: jiff::Timestamp) -> Result<PathBuf, AtomicWriteError> {
    let stamp = now.strftime("..%Y_%m_%d_%H_%M_%S.").to_string();
    loop {
        let name = PathBuf::from(format!("{stamp}{}", rand::rng().random::<u32>()));
        let path = volume.join(&name);
        match failpoint::file!("version made", || fs::DirBuilder::new().mode(0o700).create(&path)) {
            Ok(()) => {
                fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
                    .map_err(io_error("cannot set the mode of", &path))?;
                return Ok(name);
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(io_error("cannot create", &path)(e)),
        }
    }
}

fn write_files(dir: &Path, files: &BTreeMap<PathBuf, &FileProjection>) -> Result<(), AtomicWriteError> {
    use std::io::Write as _;
    for (path, file) in files {
        let full = dir.join(path);
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            let parent = dir.join(parent);
            fs::create_dir_all(&parent).map_err(io_error("cannot create", &parent))?;
        }
        let write = || -> io::Result<()> {
            let mode = file.mode & 0o7777;
            // Written with mode 0600; the requested mode is set afterwards.
            let mut f = fs::OpenOptions::new().create_new(true).write(true).mode(0o600).open(&full)?;
            f.write_all(&file.data)?;
            f.set_permissions(fs::Permissions::from_mode(mode))?;
            match file.owner {
                Some(uid) => lchown(&full, Some(uid), None),
                None => Ok(()),
            }
        };
        failpoint::file!("version written", write).map_err(io_error("cannot write", &full))?;
    }
    Ok(())
}

fn switch(volume: &Path, name: &Path) -> Result<(), AtomicWriteError> {
    let fresh = volume.join(NEW_DATA);
    match fs::remove_file(&fresh) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io_error("cannot remove", &fresh)(e)),
        Ok(()) | Err(_) => {}
    }
    symlink(name, &fresh).map_err(io_error("cannot link", &fresh))?;
    let switched = failpoint::file!("version switched to", || fs::rename(&fresh, volume.join(DATA)));
    switched.map_err(io_error("cannot rename", &fresh))
}

fn visible(files: &BTreeMap<PathBuf, &FileProjection>) -> BTreeMap<PathBuf, Option<u32>> {
    let mut out = BTreeMap::new();
    for (path, file) in files {
        if let Some(first) = path.components().next() {
            out.entry(PathBuf::from(first.as_os_str())).or_insert(file.owner);
        }
    }
    out
}

fn link_visible(volume: &Path, files: &BTreeMap<PathBuf, &FileProjection>) -> Result<(), AtomicWriteError> {
    for (name, owner) in visible(files) {
        let link = volume.join(&name);
        if fs::read_link(&link).is_ok() {
            continue;
        }
        failpoint::file!("file of a version linked", || symlink(Path::new(DATA).join(&name), &link))
            .map_err(io_error("cannot link", &link))?;
        if let Some(uid) = owner {
            lchown(&link, Some(uid), None).map_err(io_error("cannot own", &link))?;
        }
    }
    Ok(())
}

fn remove_visible(volume: &Path, files: &BTreeMap<PathBuf, &FileProjection>) -> Result<(), AtomicWriteError> {
    let keep = visible(files);
    for entry in fs::read_dir(volume).map_err(io_error("cannot read", volume))? {
        let entry = entry.map_err(io_error("cannot read", volume))?;
        let path = entry.path();
        let ours = fs::read_link(&path).is_ok_and(|target| target.starts_with(DATA));
        if ours && !keep.contains_key(Path::new(&entry.file_name())) {
            fs::remove_file(&path).map_err(io_error("cannot remove", &path))?;
        }
    }
    Ok(())
}

/// Removes earlier versions, including those of a crash. A failed removal is repeated by the next write.
fn remove_stale(volume: &Path, keep: &Path) {
    for entry in fs::read_dir(volume).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let version = name.to_string_lossy().starts_with("..") && Path::new(&name) != keep;
        if version && entry.file_type().is_ok_and(|t| t.is_dir()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn now() -> jiff::Timestamp {
        "2026-01-02T03:04:05Z".parse().unwrap()
    }

    fn payload(files: &[(&str, &str)]) -> Payload {
        files
            .iter()
            .map(|(p, d)| {
                ((*p).to_owned(), FileProjection { data: d.as_bytes().to_vec(), mode: 0o644, owner: None })
            })
            .collect()
    }

    fn put(dir: &Path, files: &[(&str, &str)]) -> bool {
        write(dir, &payload(files), now(), |_| Ok(())).unwrap()
    }

    fn names(dir: &Path) -> BTreeSet<String> {
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn the_layout_is_the_kubelets() {
        let dir = tempfile::tempdir().unwrap();
        assert!(put(dir.path(), &[("a", "1"), ("sub/b", "2"), ("sub/c/d", "3")]));
        let target = fs::read_link(dir.path().join("..data")).unwrap();
        assert!(target.to_str().unwrap().starts_with("..2026_01_02_03_04_05."));
        assert_eq!(fs::metadata(dir.path().join(&target)).unwrap().permissions().mode() & 0o777, 0o755);
        assert_eq!(fs::read_link(dir.path().join("a")).unwrap(), Path::new("..data/a"));
        assert_eq!(fs::read_link(dir.path().join("sub")).unwrap(), Path::new("..data/sub"));
        assert_eq!(fs::read_to_string(dir.path().join("sub/c/d")).unwrap(), "3");
        assert_eq!(names(dir.path()).len(), 4);
    }

    #[test]
    fn equal_bytes_are_not_written_again() {
        let dir = tempfile::tempdir().unwrap();
        assert!(put(dir.path(), &[("a", "1")]));
        let before = fs::read_link(dir.path().join("..data")).unwrap();
        assert!(!put(dir.path(), &[("a", "1")]));
        let mut other = payload(&[("a", "1")]);
        other.get_mut("a").unwrap().mode = 0o600;
        assert!(!write(dir.path(), &other, now(), |_| Ok(())).unwrap());
        assert_eq!(fs::read_link(dir.path().join("..data")).unwrap(), before);
        fs::remove_file(dir.path().join("a")).unwrap();
        assert!(!put(dir.path(), &[("a", "1")]));
        assert_eq!(fs::read_to_string(dir.path().join("a")).unwrap(), "1");
    }

    #[test]
    fn a_file_removed_from_the_payload_is_removed_from_the_volume() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), &[("a", "1"), ("b/x", "2"), ("b/y", "3")]);
        fs::create_dir(dir.path().join("nested")).unwrap();
        fs::create_dir(dir.path().join("..2020_01_01_00_00_00.1")).unwrap();
        assert!(put(dir.path(), &[("b/x", "2")]));
        assert!(!dir.path().join("a").exists());
        assert!(!dir.path().join("b/y").exists());
        assert!(dir.path().join("nested").is_dir());
        assert_eq!(names(dir.path()).len(), 4, "{:?}", names(dir.path()));
        assert!(put(dir.path(), &[]));
        assert!(!put(dir.path(), &[]));
    }

    #[test]
    fn mode_and_owner_are_exact() {
        let dir = tempfile::tempdir().unwrap();
        let file = FileProjection { data: vec![1], mode: 0o400, owner: Some(1234) };
        write(dir.path(), &[("t".to_owned(), file)].into(), now(), |_| Ok(())).unwrap();
        let meta = fs::metadata(dir.path().join("t")).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.uid()), (0o400, 1234));
        assert_eq!(fs::symlink_metadata(dir.path().join("t")).unwrap().uid(), 1234);
    }

    #[test]
    fn a_path_cannot_leave_the_volume() {
        let dir = tempfile::tempdir().unwrap();
        let long = "x".repeat(256);
        for bad in ["", "/a", "..", "../a", "a/../b", "..x", ".", long.as_str()] {
            let got = write(dir.path(), &payload(&[(bad, "")]), now(), |_| Ok(()));
            assert!(got.unwrap_err().to_string().starts_with("invalid path: "), "{bad}");
        }
        assert!(put(dir.path(), &[("a..b", ""), ("./c", ""), ("d/..e", "")]));
    }

    #[test]
    fn a_failure_before_the_switch_leaves_readers_alone() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), &[("a", "1")]);
        let got = write(dir.path(), &payload(&[("a", "2")]), now(), |_| Err(io::Error::other("no")));
        assert!(got.is_err());
        assert_eq!(fs::read_to_string(dir.path().join("a")).unwrap(), "1");
        assert_eq!(names(dir.path()).len(), 3);
    }

    #[test]
    fn a_reader_never_sees_a_mixture() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), &[("a", "0"), ("b", "0")]);
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            let reader = s.spawn(|| {
                let mut rounds = 0;
                while !stop.load(Ordering::Relaxed) {
                    // The link always exists. The version that it points to may be deleted during the read.
                    let version = dir.path().join(fs::read_link(dir.path().join("..data")).unwrap());
                    let read = |n: &str| fs::read_to_string(version.join(n));
                    if let (Ok(a), Ok(b)) = (read("a"), read("b")) {
                        assert_eq!(a, b);
                    }
                    assert!(fs::symlink_metadata(dir.path().join("a")).is_ok());
                    rounds += 1;
                }
                rounds
            });
            for i in 1..300 {
                let text = i.to_string();
                put(dir.path(), &[("a", &text), ("b", &text)]);
            }
            stop.store(true, Ordering::Relaxed);
            assert!(reader.join().unwrap() > 0);
        });
    }
}
