//! Records of the images that were pulled here and of the credentials used, in the kubelet's files in
//! `image_manager` of the root directory (`pkg/kubelet/images/pullmanager`), so that kubelet and Quintlet can
//! replace each other.
//!
//! An intent is written before a pull and removed once the result is recorded. An intent that remains means
//! that the image may have been pulled with unknown credentials. Files are small and written only when a pull
//! begins or ends.
//!
//! Methods that write block, and belong on a blocking thread. [`PullRecords::access`] waits for no disk.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::Mutex;
use quintlet_kit::clock::Clock;
use serde::{Deserialize, Serialize};
use sha2::Digest as _;

use pod_sync_node_decisions::image_access::{
    self, CredentialCheck, CredentialMapping, ImageOrigin, ImagePullSecret, ImagePullServiceAccount,
    PolicyCheck, PullCredentials, VerificationPolicy,
};
use pod_sync_node_decisions::image_gc::Image;
use pod_sync_node_decisions::image_name;

const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
/// API versions that can be read.
const API_VERSIONS: [&str; 2] = [API_VERSION, "kubelet.config.k8s.io/v1alpha1"];
const INTENT: &str = "ImagePullIntent";
const PULLED: &str = "ImagePulledRecord";

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct IntentFile {
    kind: String,
    api_version: String,
    image: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PulledFile {
    kind: String,
    api_version: String,
    last_updated_time: Option<Timestamp>,
    image_ref: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    credential_mapping: CredentialMapping,
}

#[derive(Debug, Default)]
struct Intent {
    // Each pull in progress has a clone.
    running: Arc<()>,
}

impl Intent {
    fn is_running(&self) -> bool {
        Arc::strong_count(&self.running) > 1
    }
}

#[derive(Debug)]
struct Pulled {
    known: CredentialMapping,
    // CLOCK_BOOTTIME of the last change by this process; zero for records that were read.
    changed: Duration,
}

#[derive(Debug, Default)]
struct Inner {
    // By image name, as sent to the runtime.
    intents: BTreeMap<String, Intent>,
    // By image ID.
    pulled: BTreeMap<String, Pulled>,
    // Names of files that cannot be read. Only the hash of the image is known.
    unreadable: BTreeSet<String>,
}

/// The directories of the records.
#[derive(Debug)]
struct Files {
    pulling: PathBuf,
    pulled: PathBuf,
}

/// The records of one node. Clones share them.
#[derive(Debug, Clone)]
pub struct PullRecords {
    // Held while files are written, and then before `inner`.
    files: Arc<Mutex<Files>>,
    policy: Arc<VerificationPolicy>,
    clock: Clock,
    // Never held while a file is accessed.
    inner: Arc<Mutex<Inner>>,
}

/// Permission of pods to use an image that is present.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// Every pod may use the image.
    Free,
    /// The image must be pulled again.
    Pull,
    /// The pod's credentials decide; see [`PullRecords::may_use`].
    Ask,
}

/// A pull in progress. If it is dropped, the result of the pull is unknown.
#[derive(Debug)]
pub struct PullInProgress {
    records: PullRecords,
    image: String,
    running: Arc<()>,
}

impl PullRecords {
    /// Reads the records. A file that cannot be read is logged and kept; its image must be pulled again.
    ///
    /// # Errors
    /// A directory cannot be created or read.
    pub fn open(root: &Path, policy: VerificationPolicy, clock: Clock) -> io::Result<Self> {
        use std::os::unix::fs::DirBuilderExt as _;
        let base = root.join("image_manager");
        let (pulling, pulled) = (base.join("pulling"), base.join("pulled"));
        for dir in [&pulling, &pulled] {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        }
        let mut inner = Inner::default();
        let bad = &mut inner.unreadable;
        for file in read_all::<IntentFile>(&pulling, |f| (&f.kind, &f.api_version), INTENT, bad)? {
            inner.intents.insert(file.image, Intent::default());
        }
        for file in read_all::<PulledFile>(&pulled, |f| (&f.kind, &f.api_version), PULLED, bad)? {
            let record = Pulled { known: file.credential_mapping, changed: Duration::ZERO };
            inner.pulled.insert(file.image_ref, record);
        }
        let files = Arc::new(Mutex::new(Files { pulling, pulled }));
        Ok(Self { files, policy: Arc::new(policy), clock, inner: Arc::new(Mutex::new(inner)) })
    }

    /// Returns whether a pod may use image `image` that is present as `id`.
    #[must_use]
    pub fn access(&self, image: &str, id: &str) -> Access {
        let inner = self.inner.lock();
        match inner.look(&self.policy, image, id) {
            PolicyCheck::Allowed => Access::Free,
            PolicyCheck::MustPull => Access::Pull,
            PolicyCheck::NeedsCredentials(_) => Access::Ask,
        }
    }

    /// Returns whether a pod with these credentials may use the image. Records new matching credentials.
    #[must_use]
    pub fn may_use(
        &self,
        image: &str,
        id: &str,
        secrets: &[ImagePullSecret],
        accounts: &[ImagePullServiceAccount],
    ) -> bool {
        let files = self.files.lock();
        let answer = match self.inner.lock().look(&self.policy, image, id) {
            PolicyCheck::Allowed => CredentialCheck::Allowed,
            PolicyCheck::MustPull => CredentialCheck::MustPull,
            PolicyCheck::NeedsCredentials(pull_credentials) => {
                image_access::check_credentials(pull_credentials, secrets, accounts)
            }
        };
        match answer {
            CredentialCheck::Allowed => true,
            CredentialCheck::MustPull => false,
            CredentialCheck::AllowedByMatch(secret) => {
                let pull_credentials =
                    PullCredentials { kubernetes_secrets: vec![secret], ..PullCredentials::default() };
                // Without the record the pod's credentials are checked again.
                if let Err(error) = self.merge(&files, image, id, pull_credentials) {
                    tracing::warn!(image, %error, "failed to write record of pulled image");
                }
                true
            }
        }
    }

    /// Records the intent to pull an image.
    ///
    /// # Errors
    /// The intent cannot be written. Without it the image would look preloaded.
    pub fn begin(&self, image: &str) -> io::Result<PullInProgress> {
        let files = self.files.lock();
        let file = IntentFile {
            kind: INTENT.to_owned(),
            api_version: API_VERSION.to_owned(),
            image: image.to_owned(),
        };
        write(&files.pulling.join(file_name(image)), &file)?;
        let running = Arc::clone(&self.inner.lock().intents.entry(image.to_owned()).or_default().running);
        Ok(PullInProgress { records: self.clone(), image: image.to_owned(), running })
    }

    /// Converts intents of earlier processes: those whose image is in `images`, the runtime's list, become
    /// records of pulls with unknown credentials. The others are removed.
    pub fn recover(&self, images: &[Image]) {
        let files = self.files.lock();
        let left: Vec<String> = {
            let inner = self.inner.lock();
            inner.intents.iter().filter(|(_, i)| !i.is_running()).map(|(image, _)| image.clone()).collect()
        };
        for image in left {
            let name = image_name::full_name(&image);
            let mut matching = images.iter().filter(|i| i.names.contains(&name));
            let recorded =
                matching.try_for_each(|i| self.merge(&files, &image, &i.id, PullCredentials::default()));
            match recorded {
                Ok(()) => self.drop_intent(&files, &image),
                Err(error) => tracing::warn!(image, %error, "failed to write record of pulled image"),
            }
        }
    }

    /// Returns whether there are intents of an earlier process.
    #[must_use]
    pub fn has_stale_intents(&self) -> bool {
        self.inner.lock().intents.values().any(|i| !i.is_running())
    }

    /// Removes records of images that are not in `images`, as listed at CLOCK_BOOTTIME `since`.
    ///
    /// The kubelet also removes records of images in use, which gives every pod access to them. Here they
    /// stay.
    pub fn prune(&self, images: &BTreeSet<String>, since: Duration) {
        let files = self.files.lock();
        let gone: Vec<String> = {
            let inner = self.inner.lock();
            let unused = |(id, pulled): &(&String, &Pulled)| !images.contains(*id) && pulled.changed < since;
            inner.pulled.iter().filter(unused).map(|(id, _)| id.clone()).collect()
        };
        for id in gone {
            match remove(&files.pulled.join(file_name(&id))) {
                Ok(()) => drop(self.inner.lock().pulled.remove(&id)),
                Err(error) => tracing::warn!(image = id, %error, "failed to remove record of pulled image"),
            }
        }
    }

    fn merge(
        &self,
        files: &Files,
        image: &str,
        id: &str,
        pull_credentials: PullCredentials,
    ) -> io::Result<()> {
        let old = self.inner.lock().pulled.get(id).map(|p| p.known.clone());
        let mut known = old.clone().unwrap_or_default();
        if pull_credentials != PullCredentials::default() {
            known.entry(image_name::repository(image)).or_default().merge(pull_credentials);
        }
        if old.as_ref() == Some(&known) {
            return Ok(());
        }
        let now = Timestamp::from_second(self.clock.wall().as_second()).unwrap_or(Timestamp::UNIX_EPOCH);
        let file = PulledFile {
            kind: PULLED.to_owned(),
            api_version: API_VERSION.to_owned(),
            last_updated_time: Some(now),
            image_ref: id.to_owned(),
            credential_mapping: known.clone(),
        };
        write(&files.pulled.join(file_name(id)), &file)?;
        let mut inner = self.inner.lock();
        inner.unreadable.remove(&file_name(id));
        inner.pulled.insert(id.to_owned(), Pulled { known, changed: self.clock.boot() });
        Ok(())
    }

    // An intent that another pull of the same image needs stays.
    fn drop_intent(&self, files: &Files, image: &str) {
        // No pull begins meanwhile, since that writes a file.
        if self.inner.lock().intents.get(image).is_none_or(Intent::is_running) {
            return;
        }
        match remove(&files.pulling.join(file_name(image))) {
            Ok(()) => {
                let mut inner = self.inner.lock();
                inner.intents.remove(image);
                inner.unreadable.remove(&file_name(image));
            }
            Err(error) => tracing::warn!(image, %error, "failed to remove intent of image pull"),
        }
    }
}

impl Inner {
    fn look<'a>(&'a self, policy: &VerificationPolicy, image: &str, id: &str) -> PolicyCheck<'a> {
        let origin = match self.pulled.get(id) {
            Some(pulled) => ImageOrigin::Pulled(&pulled.known),
            None if self.intents.contains_key(image) || self.is_unreadable(image, id) => {
                ImageOrigin::PullIntent
            }
            None => ImageOrigin::Preloaded,
        };
        image_access::check_policy(policy, &image_name::repository(image), origin)
    }

    fn is_unreadable(&self, image: &str, id: &str) -> bool {
        !self.unreadable.is_empty()
            && [image, id].iter().any(|name| self.unreadable.contains(&file_name(name)))
    }
}

impl PullInProgress {
    /// Records that the image was pulled as `id` with `pull_credentials`.
    pub fn pulled(self, id: &str, pull_credentials: PullCredentials) {
        let Self { records, image, running } = self;
        let files = records.files.lock();
        drop(running);
        match records.merge(&files, &image, id, pull_credentials) {
            Ok(()) => records.drop_intent(&files, &image),
            // The intent stays, so that the image does not look preloaded.
            Err(error) => tracing::warn!(image, %error, "failed to write record of pulled image"),
        }
    }

    /// Records that the pull failed.
    pub fn failed(self) {
        let Self { records, image, running } = self;
        let files = records.files.lock();
        drop(running);
        records.drop_intent(&files, &image);
    }
}

fn file_name(name: &str) -> String {
    format!("sha256-{}", hex::encode(sha2::Sha256::digest(name)))
}

/// Formats JSON as Go does: one line.
fn write(path: &Path, file: &impl Serialize) -> io::Result<()> {
    let json = serde_json::to_string(file).map_err(io::Error::other)?;
    let json = format!("{}\n", quintlet_model::hash::escape_as_go(&json));
    // Synced: an image whose record is lost with the power looks preloaded, and every pod may use it.
    quintlet_kit::atomic_file::write_durable(path, json.as_bytes(), 0o600)
}

fn remove(path: &Path) -> io::Result<()> {
    match quintlet_kit::failpoint::file!("pull record removed", || std::fs::remove_file(path)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

fn read_all<T: for<'a> Deserialize<'a>>(
    dir: &Path,
    version: impl Fn(&T) -> (&str, &str),
    kind: &str,
    unreadable: &mut BTreeSet<String>,
) -> io::Result<Vec<T>> {
    let mut out = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        // Other files are left behind by a writer that was killed.
        if name.strip_prefix("sha256-").is_none_or(|h| h.len() != 64) {
            continue;
        }
        let read = std::fs::read(&path).and_then(|bytes| {
            serde_json::from_slice::<T>(&bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
        });
        match read {
            Ok(file) if version(&file).0 == kind && API_VERSIONS.contains(&version(&file).1) => {
                out.push(file)
            }
            unusable => {
                let error = unusable.err().map_or_else(|| "of another version".to_owned(), |e| e.to_string());
                tracing::warn!(path = %path.display(), error, "not a {kind}, its image is verified by a pull");
                unreadable.insert(name.to_owned());
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests;
