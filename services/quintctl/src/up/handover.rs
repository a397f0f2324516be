//! Copies files for services that do not run as root: the configuration, the kubeconfig with the files that
//! it names, the client CA, the serving certificate and its key. The originals may be readable by root only.
//!
//! Each service has a directory of copies that belongs to root, that the service may read, and that no other
//! service may enter. A copy is refreshed when its original changes, since credentials are rotated. No
//! service can write where root writes.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use parking_lot::Mutex;
use quintlet_kit::atomic_file::{self, Owner};
use quintlet_kit::contain::contained_request;
use quintlet_kit::task;
use quintlet_kit::timers::FileChecks;
use serde_json::Value;

/// Longest wait between refreshes of the copies.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Mode of a copy, which belongs to root and the group of the service.
const MODE: u32 = 0o440;

/// Kubeconfig fields that name a file: the object, the field, and the field for the content of the file.
const FILES: [(&str, &str, &str); 3] = [
    ("cluster", "certificate-authority", "certificate-authority-data"),
    ("user", "client-certificate", "client-certificate-data"),
    ("user", "client-key", "client-key-data"),
];

/// The type of a copied file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyKind {
    Plain,
    /// A kubeconfig. Its copy contains the files that it names.
    Kubeconfig,
    /// A kubeconfig that pod-sync writes after a bootstrap.
    BootstrappedKubeconfig,
    /// A file that pod-sync may write, such as the serving certificate that it requests.
    Issued,
    /// A directory of drop-in configuration files, which may be added and removed at any time.
    DropIns,
}

/// A file to copy for a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FileCopy {
    pub(super) service: &'static str,
    pub(super) from: PathBuf,
    pub(super) to: PathBuf,
    pub(super) kind: CopyKind,
    /// Group of the service, which may read the copy.
    pub(super) gid: u32,
}

/// The copies for all services.
#[derive(Debug, Default)]
pub(super) struct Copies {
    files: Vec<FileCopy>,
    /// Content of the copies, by path.
    written: BTreeMap<PathBuf, Vec<u8>>,
    /// A copy was written since the last check.
    has_changed: bool,
}

impl Copies {
    /// Makes the first copies. Returns them and the files that could not be copied.
    pub(super) fn make(files: Vec<FileCopy>) -> (Self, Vec<(FileCopy, io::Error)>) {
        let mut copies = Self { files, ..Self::default() };
        let failed = copies.refresh();
        (copies, failed)
    }

    /// Copies the files that have changed. Returns the files that could not be copied.
    fn refresh(&mut self) -> Vec<(FileCopy, io::Error)> {
        let mut failed = Vec::new();
        for file in self.files.clone() {
            match file.kind {
                CopyKind::Plain | CopyKind::Kubeconfig => failed.extend(self.copy(file)),
                CopyKind::BootstrappedKubeconfig | CopyKind::Issued => {
                    let failure = self.copy(file);
                    failed.extend(failure.filter(|(_, error)| error.kind() != io::ErrorKind::NotFound));
                }
                CopyKind::DropIns => match self.drop_ins(&file) {
                    Ok(files) => failed.extend(files.into_iter().filter_map(|file| self.copy(file))),
                    Err(error) => failed.push((file, error)),
                },
            }
        }
        failed
    }

    /// Copies a file if it has changed. Returns the file and the error if that failed.
    fn copy(&mut self, file: FileCopy) -> Option<(FileCopy, io::Error)> {
        let content = match file.kind {
            CopyKind::Kubeconfig | CopyKind::BootstrappedKubeconfig => {
                inline_files(&file.from).map(String::into_bytes)
            }
            CopyKind::Plain | CopyKind::DropIns | CopyKind::Issued => std::fs::read(&file.from),
        };
        let copied = content.and_then(|content| {
            if self.written.get(&file.to) != Some(&content) {
                let owner = Owner { uid: 0, gid: file.gid };
                atomic_file::write_owned(&file.to, &content, MODE, owner)?;
                self.written.insert(file.to.clone(), content);
                self.has_changed = true;
            }
            Ok(())
        });
        copied.err().map(|error| (file, error))
    }

    /// Returns the files of a directory of drop-ins, and removes copies without an original.
    fn drop_ins(&mut self, dir: &FileCopy) -> io::Result<Vec<FileCopy>> {
        let names = conf_files(&dir.from)?;
        for gone in conf_files(&dir.to)?.difference(&names) {
            let copy = dir.to.join(gone);
            std::fs::remove_file(&copy)?;
            self.written.remove(&copy);
        }
        let file = |name: &OsString| FileCopy {
            from: dir.from.join(name),
            to: dir.to.join(name),
            kind: CopyKind::Plain,
            ..dir.clone()
        };
        Ok(names.iter().map(file).collect())
    }

    /// Refreshes the copies periodically. Does not return while the runtime runs.
    pub(super) async fn keep_refreshed(self) {
        let copies = Arc::new(Mutex::new(self));
        let mut checks = FileChecks::new(LONGEST_WAIT);
        loop {
            checks.pause().await;
            let copies = Arc::clone(&copies);
            let refresh = move || {
                let mut copies = copies.lock();
                (copies.refresh(), std::mem::take(&mut copies.has_changed))
            };
            // The panic hook has logged a panic. The next refresh follows.
            let (failed, has_changed) =
                contained_request(None, task::blocking(refresh)).await.unwrap_or_default();
            if has_changed {
                checks.reset();
            }
            for (file, error) in failed {
                tracing::warn!(%error, file = %file.from.display(), service = file.service, "copy of file failed, retrying");
            }
        }
    }
}

/// Returns the names of the drop-in files in a directory, which may not exist.
fn conf_files(dir: &Path) -> io::Result<BTreeSet<OsString>> {
    let entries = match std::fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => entries?,
    };
    let paths = entries.map(|entry| entry.map(|entry| PathBuf::from(entry.file_name())));
    let is_conf = |path: &PathBuf| path.extension().is_some_and(|e| e == "conf");
    let names = paths.filter(|path| path.as_ref().map_or(true, is_conf));
    names.map(|path| path.map(PathBuf::into_os_string)).collect()
}

/// Creates the directory of the node API's self-signed certificate. The owner and mode of an existing
/// directory are kept, since it may be the kubelet's.
pub(super) fn prepare_cert_dir(dir: &Path, uid: Option<u32>) -> io::Result<()> {
    if dir.exists() {
        return Ok(());
    }
    if let Some(parent) = dir.parent() {
        std::fs::create_dir_all(parent)?;
    }
    // The directory is new and its parent belongs to root: no other user can replace it before the chmod and
    // chown.
    std::fs::create_dir(dir)?;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700))?;
    uid.map_or(Ok(()), |uid| chown(dir, Some(uid), Some(uid)))
}

/// Returns a kubeconfig that contains the files that it names, as JSON, which is valid YAML.
fn inline_files(path: &Path) -> io::Result<String> {
    let invalid = |e: &dyn std::fmt::Display| io::Error::new(io::ErrorKind::InvalidData, e.to_string());
    let text = std::fs::read_to_string(path)?;
    let mut config: Value = serde_saphyr::from_str(&text).map_err(|e| invalid(&e))?;
    let beside = path.parent().unwrap_or(Path::new("/"));
    for (list, entry) in [("clusters", "cluster"), ("users", "user")] {
        for item in config[list].as_array_mut().into_iter().flatten() {
            let Some(fields) = item[entry].as_object_mut() else { continue };
            for (_, file, data) in FILES.iter().filter(|(document, ..)| *document == entry) {
                if let Some(Value::String(named)) = fields.remove(*file) {
                    let bytes = std::fs::read(beside.join(named))?;
                    fields.insert(
                        (*data).to_owned(),
                        base64::engine::general_purpose::STANDARD.encode(bytes).into(),
                    );
                }
            }
            if let Some(Value::String(named)) = fields.remove("tokenFile") {
                let token = std::fs::read_to_string(beside.join(named))?;
                fields.insert("token".to_owned(), token.trim().into());
            }
        }
    }
    serde_json::to_string(&config).map_err(|e| invalid(&e))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use super::*;

    fn handed(original: &Path, copy: &Path, kind: CopyKind) -> FileCopy {
        // A group of this process, so that the test needs no root.
        let gid = nix::unistd::getegid().as_raw();
        FileCopy { service: "node-api", from: original.to_owned(), to: copy.to_owned(), kind, gid }
    }

    #[test]
    fn the_certificates_directory_is_created_once_and_belongs_to_node_api() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("a/pki");
        let mode = || std::fs::metadata(&dir).unwrap().permissions().mode() & 0o777;
        prepare_cert_dir(&dir, None).unwrap();
        assert_eq!(mode(), 0o700);
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
        prepare_cert_dir(&dir, None).unwrap();
        assert_eq!(mode(), 0o755, "an existing directory is unchanged");
    }

    #[test]
    fn the_copy_of_a_kubeconfig_contains_the_files_that_it_names() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("ca.pem"), "CA").unwrap();
        std::fs::write(dir.path().join("t"), "secret\n").unwrap();
        let original = dir.path().join("kubeconfig");
        std::fs::write(
            &original,
            "apiVersion: v1\nclusters:\n- name: c\n  cluster: {server: \"https://x\", certificate-authority: ca.pem}\n\
             users:\n- name: u\n  user: {tokenFile: t}\n",
        )
        .unwrap();
        let copy = dir.path().join("copy");
        let file = handed(&original, &copy, CopyKind::Kubeconfig);
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let (mut copies, failed) = Copies::make(vec![file]);
        assert!(failed.is_empty(), "{failed:?}");
        let read: Value = serde_json::from_str(&std::fs::read_to_string(&copy).unwrap()).unwrap();
        assert_eq!(read["clusters"][0]["cluster"]["certificate-authority-data"], "Q0E=");
        assert_eq!(read["clusters"][0]["cluster"]["certificate-authority"], Value::Null);
        assert_eq!(read["users"][0]["user"], serde_json::json!({"token": "secret"}));
        assert_eq!(std::fs::metadata(&copy).unwrap().mode() & 0o7777, 0o440);
        std::fs::remove_file(dir.path().join("ca.pem")).unwrap();
        assert_eq!(copies.refresh().len(), 1);
    }

    #[test]
    fn files_that_pod_sync_will_write_may_be_missing_at_first() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let place = |name: &str| dir.path().join(name);
        let files = vec![
            handed(&place("kubelet.conf"), &place("k"), CopyKind::BootstrappedKubeconfig),
            handed(&place("server.pem"), &place("s"), CopyKind::Issued),
        ];
        let (mut copies, failed) = Copies::make(files);
        assert!(failed.is_empty(), "{failed:?}");
        std::fs::write(place("server.pem"), "one").unwrap();
        std::fs::write(
            place("kubelet.conf"),
            format!("users: [{{name: u, user: {{client-key: {}}}}}]", place("server.pem").display()),
        )
        .unwrap();
        assert!(copies.refresh().is_empty());
        assert_eq!(std::fs::read_to_string(place("s")).unwrap(), "one");
        let read: Value = serde_json::from_str(&std::fs::read_to_string(place("k")).unwrap()).unwrap();
        assert_eq!(read["users"][0]["user"], serde_json::json!({"client-key-data": "b25l"}));
        std::fs::write(place("kubelet.conf"), "{").unwrap();
        assert_eq!(copies.refresh().len(), 1);
    }

    #[test]
    fn a_copy_follows_its_original_and_no_link_in_its_place() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let [original, copy, victim] = ["tls.key", "copy", "victim"].map(|name| dir.path().join(name));
        std::fs::write(&original, "one").unwrap();
        std::fs::set_permissions(&original, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&victim, "host").unwrap();
        symlink(&victim, &copy).unwrap();
        let (mut copies, failed) = Copies::make(vec![handed(&original, &copy, CopyKind::Plain)]);
        assert!(failed.is_empty(), "{failed:?}");
        std::fs::write(&original, "two").unwrap();
        assert!(copies.refresh().is_empty());
        assert_eq!(std::fs::read_to_string(&copy).unwrap(), "two");
        let written = std::fs::metadata(&copy).unwrap().ino();
        assert!(copies.refresh().is_empty());
        assert_eq!(std::fs::metadata(&copy).unwrap().ino(), written, "unchanged, not written again");
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "host");
    }
    #[test]
    fn drop_ins_that_are_added_or_removed_later_are_added_or_removed_for_services() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let [original, copy] = ["conf.d", "copies"].map(|name| dir.path().join(name));
        std::fs::create_dir(&copy).unwrap();
        std::fs::write(copy.join("of-an-earlier-run.conf"), "old").unwrap();
        let found = || {
            let entries = std::fs::read_dir(&copy).unwrap().map(|e| e.unwrap().path());
            let mut files: Vec<_> = entries
                .map(|path| (path.file_name().unwrap().to_owned(), std::fs::read_to_string(path).unwrap()))
                .collect();
            files.sort();
            files
        };
        let file = |name: &str, text: &str| (OsString::from(name), text.to_owned());
        let (mut copies, failed) = Copies::make(vec![handed(&original, &copy, CopyKind::DropIns)]);
        assert!(failed.is_empty(), "{failed:?}");
        assert_eq!(found(), [], "there is no directory yet");
        std::fs::create_dir(&original).unwrap();
        std::fs::write(original.join("10-a.conf"), "one").unwrap();
        std::fs::write(original.join("notes.txt"), "no configuration").unwrap();
        assert!(copies.refresh().is_empty());
        assert_eq!(found(), [file("10-a.conf", "one")]);
        std::fs::write(original.join("20-b.conf"), "two").unwrap();
        std::fs::write(original.join("10-a.conf"), "changed").unwrap();
        assert!(copies.refresh().is_empty());
        assert_eq!(found(), [file("10-a.conf", "changed"), file("20-b.conf", "two")]);
        std::fs::remove_file(original.join("10-a.conf")).unwrap();
        assert!(copies.refresh().is_empty());
        assert_eq!(found(), [file("20-b.conf", "two")]);
    }
}
