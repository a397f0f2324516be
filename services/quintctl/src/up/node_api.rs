//! What the node API needs of root before it runs without: directories, sockets it may open, and a kubeconfig of its own.
//!
//! The kubeconfig given may be for root alone, and names files that are. The copy is whole, belongs to the node API's user,
//! and follows the original: credentials are rotated.

use std::io;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use quintlet_kit::paths::Paths;
use serde_json::Value;

use super::plan::Layout;

/// Between two looks at the original.
const EVERY: Duration = Duration::from_secs(5);

/// Fields that name a file, and those that hold what is in it.
const FILES: [(&str, &str, &str); 3] = [
    ("cluster", "certificate-authority", "certificate-authority-data"),
    ("user", "client-certificate", "client-certificate-data"),
    ("user", "client-key", "client-key-data"),
];

/// Makes the directories. Sockets take the group of their directory, so that the node API reaches them.
///
/// # Errors
/// One cannot be made or given away.
pub(super) fn prepare(layout: &Layout, uid: Option<u32>) -> io::Result<()> {
    let own = layout.node_api_dir();
    std::fs::create_dir_all(&own)?;
    std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o700))?;
    prepare_cert_dir(&layout.cert_dir, uid)?;
    let Some(uid) = uid else { return Ok(()) };
    chown(&own, Some(uid), Some(uid))?;
    // Whoever asks for its health is root, who is kept out of nothing.
    let paths = Paths::new(&layout.run_dir);
    for socket in [paths.podsync(), paths.pleg(), paths.status(), paths.probe("any")] {
        let Some(dir) = socket.parent() else { continue };
        std::fs::create_dir_all(dir)?;
        chown(dir, None, Some(uid))?;
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o2750))?;
    }
    Ok(())
}

/// One that is there stays whose it is: it may be the kubelet's.
fn prepare_cert_dir(dir: &Path, uid: Option<u32>) -> io::Result<()> {
    if dir.exists() {
        return Ok(());
    }
    std::fs::create_dir_all(dir)?;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700))?;
    uid.map_or(Ok(()), |uid| chown(dir, Some(uid), Some(uid)))
}

/// Copies the kubeconfig whenever it or a file that it names has changed, for ever.
pub(super) async fn keep_kubeconfig(from: PathBuf, to: PathBuf, uid: Option<u32>) {
    let mut last = None;
    loop {
        match whole(&from) {
            Ok(text) if last.as_ref() == Some(&text) => {}
            Ok(text) => match write(&to, &text, uid) {
                Ok(()) => last = Some(text),
                Err(error) => tracing::warn!(%error, file = %to.display(), "no kubeconfig for the node API"),
            },
            Err(error) => tracing::warn!(%error, file = %from.display(), "cannot be copied for the node API"),
        }
        tokio::time::sleep(EVERY).await;
    }
}

/// Writes the copy, so that it is there before the node API starts.
///
/// # Errors
/// The original cannot be read or the copy not be written.
pub(super) fn copy_kubeconfig(from: &Path, to: &Path, uid: Option<u32>) -> io::Result<()> {
    write(to, &whole(from)?, uid)
}

fn write(to: &Path, text: &str, uid: Option<u32>) -> io::Result<()> {
    // Given away before it bears its name: a reader never finds one that it may not read.
    let new = to.with_extension("new");
    quintlet_kit::atomic_file::write(&new, text.as_bytes(), 0o400)?;
    if let Some(uid) = uid {
        chown(&new, Some(uid), Some(uid))?;
    }
    std::fs::rename(&new, to)
}

/// A kubeconfig with the content of the files it names, as JSON, which is YAML.
fn whole(path: &Path) -> io::Result<String> {
    let invalid = |e: &dyn std::fmt::Display| io::Error::new(io::ErrorKind::InvalidData, e.to_string());
    let text = std::fs::read_to_string(path)?;
    let mut config: Value = serde_saphyr::from_str(&text).map_err(|e| invalid(&e))?;
    let beside = path.parent().unwrap_or(Path::new("/"));
    for (list, entry) in [("clusters", "cluster"), ("users", "user")] {
        for item in config[list].as_array_mut().into_iter().flatten() {
            let Some(fields) = item[entry].as_object_mut() else { continue };
            for (_, file, data) in FILES.iter().filter(|(of, ..)| *of == entry) {
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
    use super::*;

    #[test]
    fn the_certificates_directory_is_made_once_and_for_the_node_api_alone() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("a/pki");
        let mode = || std::fs::metadata(&dir).unwrap().permissions().mode() & 0o777;
        prepare_cert_dir(&dir, None).unwrap();
        assert_eq!(mode(), 0o700);
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
        prepare_cert_dir(&dir, None).unwrap();
        assert_eq!(mode(), 0o755, "what was there stays as it was");
    }

    #[test]
    fn the_copy_holds_what_the_original_names() {
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
        copy_kubeconfig(&original, &copy, None).unwrap();
        let read: Value = serde_json::from_str(&std::fs::read_to_string(&copy).unwrap()).unwrap();
        assert_eq!(read["clusters"][0]["cluster"]["certificate-authority-data"], "Q0E=");
        assert_eq!(read["clusters"][0]["cluster"]["certificate-authority"], Value::Null);
        assert_eq!(read["users"][0]["user"], serde_json::json!({"token": "secret"}));
        assert_eq!(std::fs::metadata(&copy).unwrap().permissions().mode() & 0o777, 0o400);
        std::fs::remove_file(dir.path().join("ca.pem")).unwrap();
        assert!(copy_kubeconfig(&original, &copy, None).is_err());
    }
}
