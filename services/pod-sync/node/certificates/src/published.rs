//! Copies of credentials for services without root, which may not read the files of root.
//!
//! Each copy is in a directory of root that a group may enter. New files have the group of the directory.

use std::path::{Path, PathBuf};

use quintlet_kit::atomic_file;
use tracing::info;

use crate::kubeconfig::{KubeconfigError, inlined};

/// Mode of a copy: the group of the directory may read it.
const MODE: u32 = 0o640;

/// Name of the copy of the kubeconfig.
const KUBECONFIG: &str = "kubeconfig";

/// A directory for the copies, which exists where services have users of their own.
#[derive(Debug, Clone)]
pub(crate) struct PublishedDirectory(PathBuf);

impl PublishedDirectory {
    pub(crate) fn new(directory: &Path) -> Self {
        Self(directory.to_owned())
    }

    /// Writes a copy of a kubeconfig that contains the files that it names, if the directory exists. Returns
    /// whether it was written.
    pub(crate) fn write_kubeconfig(&self, kubeconfig: &Path) -> Result<bool, KubeconfigError> {
        if !self.0.is_dir() {
            return Ok(false);
        }
        self.write(KUBECONFIG, &inlined(kubeconfig)?)
    }

    /// Writes a copy of a certificate with its key, under the name of the link, if the directory exists.
    pub(crate) fn write_certificate(&self, current: &Path) -> Result<bool, KubeconfigError> {
        let Some(name) = current.file_name().and_then(|name| name.to_str()).filter(|_| self.0.is_dir())
        else {
            return Ok(false);
        };
        let text = std::fs::read_to_string(current)
            .map_err(|source| KubeconfigError::File { path: current.to_owned(), source })?;
        self.write(name, &text)
    }

    fn write(&self, name: &str, text: &str) -> Result<bool, KubeconfigError> {
        let path = self.0.join(name);
        if std::fs::read_to_string(&path).is_ok_and(|known| known == text) {
            return Ok(false);
        }
        atomic_file::write(&path, text.as_bytes(), MODE)
            .map_err(|source| KubeconfigError::File { path: path.clone(), source })?;
        info!(path = %path.display(), "published credential");
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::decide::{KubeconfigCredential, WantedCertificate};
    use crate::key::NodeKey;
    use crate::kubeconfig::credential_of;
    use crate::tests::self_signed;

    #[test]
    fn copies_are_readable_by_the_group_contain_all_files_and_need_their_directory() {
        let dir = tempfile::tempdir().unwrap();
        let place = |name: &str| dir.path().join(name);
        let key = NodeKey::generate().unwrap();
        let pem = self_signed(&key, &WantedCertificate::client("n1")) + key.expose();
        std::fs::write(place("current.pem"), &pem).unwrap();
        std::fs::write(place("ca.crt"), "CA").unwrap();
        std::fs::write(
            place("kubelet.conf"),
            "current-context: c\nclusters: [{name: k, cluster: {server: \"https://h\", certificate-authority: ca.crt}}]\n\
             contexts: [{name: c, context: {cluster: k, user: u}}]\n\
             users: [{name: u, user: {client-certificate: current.pem, client-key: current.pem}}]\n",
        )
        .unwrap();
        let published = PublishedDirectory::new(&place("credentials"));
        assert!(!published.write_kubeconfig(&place("kubelet.conf")).unwrap());
        assert!(!published.write_certificate(&place("current.pem")).unwrap());
        std::fs::create_dir(place("credentials")).unwrap();
        assert!(published.write_kubeconfig(&place("kubelet.conf")).unwrap());
        assert!(!published.write_kubeconfig(&place("kubelet.conf")).unwrap(), "it is the same");
        assert!(published.write_certificate(&place("current.pem")).unwrap());
        let copy = place("credentials/kubeconfig");
        assert_eq!(std::fs::metadata(&copy).unwrap().permissions().mode() & 0o777, 0o640);
        let text = std::fs::read_to_string(&copy).unwrap();
        assert!(!text.contains("current.pem") && !text.contains("ca.crt"), "{text}");
        assert!(text.contains("certificate-authority-data: Q0E="), "{text}");
        assert!(matches!(credential_of(&copy), KubeconfigCredential::Certificate(_)));
        assert_eq!(std::fs::read_to_string(place("credentials/current.pem")).unwrap(), pem);
        let text = std::fs::read_to_string(place("kubelet.conf")).unwrap();
        let user = "client-certificate: current.pem, client-key: current.pem";
        std::fs::write(place("token"), "abc\n").unwrap();
        std::fs::write(place("kubelet.conf"), text.replace(user, "tokenFile: token")).unwrap();
        assert!(published.write_kubeconfig(&place("kubelet.conf")).unwrap());
        let text = std::fs::read_to_string(&copy).unwrap();
        assert!(text.contains("token: abc") && !text.contains("tokenFile"), "{text}");
        std::fs::remove_file(place("ca.crt")).unwrap();
        assert!(published.write_kubeconfig(&place("kubelet.conf")).is_err());
    }
}
