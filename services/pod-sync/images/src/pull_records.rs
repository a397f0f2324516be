//! Which images were pulled here and with whose credentials, in the kubelet's files below `image_manager` in the root
//! directory (`pkg/kubelet/images/pullmanager`), so that one node agent can follow the other.
//!
//! An intent is written before a pull and goes once its outcome is recorded. One that is left means that the image may have
//! come with credentials that nobody knows any more. Files are small, and written only when a pull begins or ends.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::Mutex;
use quintlet_kit::clock::Clock;
use serde::{Deserialize, Serialize};
use sha2::Digest as _;

use pod_sync_decisions::image_access::{
    self, CredentialCheck, CredentialMapping, ImageOrigin, ImagePullSecret, ImagePullServiceAccount,
    PolicyCheck, PullCredentials, VerificationPolicy,
};
use pod_sync_decisions::image_gc::Image;
use pod_sync_decisions::image_name;

const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
/// Versions that may be read.
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
    // Pulls that have not ended.
    running: usize,
}

#[derive(Debug)]
struct Pulled {
    known: CredentialMapping,
    // Boottime of the last change by this process; zero for what was read.
    changed: Duration,
}

#[derive(Debug, Default)]
struct Inner {
    // By the image as the runtime is asked for it.
    intents: BTreeMap<String, Intent>,
    // By the image's id.
    pulled: BTreeMap<String, Pulled>,
    // Names of files that cannot be read: what they are about is known by its hash alone.
    unreadable: BTreeSet<String>,
}

/// The records of one node. Who owns the root directory owns them.
#[derive(Debug)]
pub struct PullRecords {
    pulling_dir: PathBuf,
    pulled_dir: PathBuf,
    policy: VerificationPolicy,
    clock: Clock,
    inner: Mutex<Inner>,
}

/// What a present image asks of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// Nothing.
    Free,
    /// To be pulled again.
    Pull,
    /// Credentials; see [`PullRecords::answer`].
    Ask,
}

/// A pull that began. Dropped without an end, its outcome is not known.
#[derive(Debug)]
pub struct Begun<'a> {
    records: &'a PullRecords,
    image: String,
    ended: bool,
}

impl PullRecords {
    /// Reads what is there. A file that cannot be read is logged and left alone; its image must be pulled again.
    ///
    /// # Errors
    /// A directory cannot be made or read.
    pub fn open(root: &Path, policy: VerificationPolicy, clock: Clock) -> io::Result<Self> {
        use std::os::unix::fs::DirBuilderExt as _;
        let base = root.join("image_manager");
        let (pulling_dir, pulled_dir) = (base.join("pulling"), base.join("pulled"));
        for dir in [&pulling_dir, &pulled_dir] {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        }
        let mut inner = Inner::default();
        let bad = &mut inner.unreadable;
        for file in read_all::<IntentFile>(&pulling_dir, |f| (&f.kind, &f.api_version), INTENT, bad)? {
            inner.intents.insert(file.image, Intent::default());
        }
        for file in read_all::<PulledFile>(&pulled_dir, |f| (&f.kind, &f.api_version), PULLED, bad)? {
            let pulled = Pulled { known: file.credential_mapping, changed: Duration::ZERO };
            inner.pulled.insert(file.image_ref, pulled);
        }
        Ok(Self { pulling_dir, pulled_dir, policy, clock, inner: Mutex::new(inner) })
    }

    /// What the image `image` that is there as `id` asks of a pod.
    #[must_use]
    pub fn access(&self, image: &str, id: &str) -> Access {
        let inner = self.inner.lock();
        match inner.look(&self.policy, image, id) {
            PolicyCheck::Allowed => Access::Free,
            PolicyCheck::MustPull => Access::Pull,
            PolicyCheck::NeedsCredentials(_) => Access::Ask,
        }
    }

    /// Whether a pod with these credentials may use it. What was learnt is written.
    #[must_use]
    pub fn answer(
        &self,
        image: &str,
        id: &str,
        secrets: &[ImagePullSecret],
        accounts: &[ImagePullServiceAccount],
    ) -> bool {
        let mut inner = self.inner.lock();
        let answer = match inner.look(&self.policy, image, id) {
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
                // Without the record the pod is asked again.
                if let Err(error) = self.merge(&mut inner, image, id, pull_credentials) {
                    tracing::warn!(image, %error, "record of a pull not written");
                }
                true
            }
        }
    }

    /// A pull begins.
    ///
    /// # Errors
    /// The intent cannot be written: nobody would know of the image.
    pub fn begin(&self, image: &str) -> io::Result<Begun<'_>> {
        let mut inner = self.inner.lock();
        let file = IntentFile {
            kind: INTENT.to_owned(),
            api_version: API_VERSION.to_owned(),
            image: image.to_owned(),
        };
        write(&self.pulling_dir.join(file_name(image)), &file)?;
        let intent = inner.intents.entry(image.to_owned()).or_default();
        intent.running = intent.running.saturating_add(1);
        Ok(Begun { records: self, image: image.to_owned(), ended: false })
    }

    /// Intents of earlier runs whose image came become records of pulls with credentials that nobody knows; the others go.
    /// `images` are those the runtime has.
    pub fn recover(&self, images: &[Image]) {
        let mut inner = self.inner.lock();
        let left: Vec<String> =
            inner.intents.iter().filter(|(_, i)| i.running == 0).map(|(image, _)| image.clone()).collect();
        for image in left {
            let name = image_name::full_name(&image);
            let mut came = images.iter().filter(|i| i.names.contains(&name));
            let recorded =
                came.try_for_each(|i| self.merge(&mut inner, &image, &i.id, PullCredentials::default()));
            match recorded {
                Ok(()) => self.drop_intent(&mut inner, &image),
                Err(error) => tracing::warn!(image, %error, "record of a pull not written"),
            }
        }
    }

    /// Whether an earlier run left intents.
    #[must_use]
    pub fn has_left_intents(&self) -> bool {
        self.inner.lock().intents.values().any(|i| i.running == 0)
    }

    /// Drops records of images that are not among `images`, as listed at boottime `since`.
    ///
    /// The kubelet also drops those of images in use, which makes them everybody's; here they stay.
    pub fn prune(&self, images: &BTreeSet<String>, since: Duration) {
        let mut inner = self.inner.lock();
        let gone: Vec<String> = inner
            .pulled
            .iter()
            .filter(|(id, pulled)| !images.contains(*id) && pulled.changed < since)
            .map(|(id, _)| id.clone())
            .collect();
        for id in gone {
            match remove(&self.pulled_dir.join(file_name(&id))) {
                Ok(()) => drop(inner.pulled.remove(&id)),
                Err(error) => tracing::warn!(image = id, %error, "record of a pull not removed"),
            }
        }
    }

    fn merge(
        &self,
        inner: &mut Inner,
        image: &str,
        id: &str,
        pull_credentials: PullCredentials,
    ) -> io::Result<()> {
        let old = inner.pulled.get(id).map(|p| &p.known);
        let mut known = old.cloned().unwrap_or_default();
        if pull_credentials != PullCredentials::default() {
            known.entry(image_name::repository(image)).or_default().merge(pull_credentials);
        }
        if old == Some(&known) {
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
        write(&self.pulled_dir.join(file_name(id)), &file)?;
        inner.unreadable.remove(&file_name(id));
        inner.pulled.insert(id.to_owned(), Pulled { known, changed: self.clock.boot() });
        Ok(())
    }

    // One that another pull of the same image still needs stays.
    fn drop_intent(&self, inner: &mut Inner, image: &str) {
        if inner.intents.get(image).is_none_or(|i| i.running > 0) {
            return;
        }
        match remove(&self.pulling_dir.join(file_name(image))) {
            Ok(()) => {
                inner.intents.remove(image);
                inner.unreadable.remove(&file_name(image));
            }
            Err(error) => tracing::warn!(image, %error, "intent of a pull not removed"),
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
        !self.unreadable.is_empty() && [image, id].iter().any(|of| self.unreadable.contains(&file_name(of)))
    }
}

impl Begun<'_> {
    /// The image came, as `id`, opened by `pull_credentials`.
    pub fn pulled(mut self, id: &str, pull_credentials: PullCredentials) {
        self.ended = true;
        let mut inner = self.records.inner.lock();
        self.leave(&mut inner);
        match self.records.merge(&mut inner, &self.image, id, pull_credentials) {
            Ok(()) => self.records.drop_intent(&mut inner, &self.image),
            // The intent stays, so that the image is not taken for one that was always there.
            Err(error) => tracing::warn!(image = self.image, %error, "record of a pull not written"),
        }
    }

    /// The runtime refused.
    pub fn failed(mut self) {
        self.ended = true;
        let mut inner = self.records.inner.lock();
        self.leave(&mut inner);
        self.records.drop_intent(&mut inner, &self.image);
    }

    fn leave(&self, inner: &mut Inner) {
        if let Some(intent) = inner.intents.get_mut(&self.image) {
            intent.running = intent.running.saturating_sub(1);
        }
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.leave(&mut self.records.inner.lock());
        }
    }
}

fn file_name(of: &str) -> String {
    format!("sha256-{}", hex::encode(sha2::Sha256::digest(of)))
}

// As Go writes it, a line.
fn write(path: &Path, file: &impl Serialize) -> io::Result<()> {
    let json = serde_json::to_string(file).map_err(io::Error::other)?;
    let json = format!("{}\n", quintlet_model::hash::escape_as_go(&json));
    quintlet_kit::atomic_file::write(path, json.as_bytes(), 0o600)
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
        // Others are what a writer that was killed left behind.
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
