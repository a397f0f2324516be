//! The UID that a kubelet computes for a static pod (`pkg/kubelet/config: applyDefaults`).
//!
//! A kubelet decodes a manifest to its internal types, sets the defaults, and hashes a dump of the result,
//! followed by the place of the manifest: `host:NODE` and `file:PATH`, or `url:URL`. The hash is FNV-1a of
//! 128 bits. Name, namespace, node, tolerations and annotations of the pod are as in the manifest at that
//! time. The dump has the name and the type of each field, so that the UID changes with the types of each
//! minor version: [`KubeletVersion`] says whose types they are.
//!
//! `internal` makes the internal pod, `types` has the types, `dump` writes the text.

mod dump;
mod internal;
mod layout;
mod quantity;
#[cfg(test)]
mod recordings;
mod types;

use k8s_openapi::api::core::v1::{Pod, ResourceRequirements};
use pod_sync_layout::SourceKind;
use quintlet_kit::contain::{Work, contained_now};
use quintlet_kit::failpoint;

pub use layout::KubeletVersion;

use crate::origin::ManifestOrigin;

/// A static pod with defaults, before its name, namespace, node, tolerations and annotations are set.
#[derive(Debug, Clone, Copy)]
pub struct StaticPod<'a> {
    /// The pod with its defaults.
    pub pod: &'a Pod,
    /// The resources of the pod as a whole in the manifest, without defaults.
    pub own_resources: Option<&'a ResourceRequirements>,
}

/// The UIDs that node agents compute for a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ComputedUids {
    /// UIDs of kubelets, in the order of [`KubeletVersion::ALL`]. Each is the former one if they cannot be
    /// computed.
    kubelets: [String; KubeletVersion::ALL.len()],
    /// The one that Quintlet computed before it computed those of kubelets. Pods that have it keep it.
    former: String,
}

impl ComputedUids {
    /// Computes the UIDs.
    #[must_use]
    pub fn of(pod: StaticPod<'_>, origin: ManifestOrigin<'_>) -> Self {
        let json = serde_json::to_string(pod.pod).unwrap_or_default();
        let former = hash(|hash| hash.write(&json), origin);
        // Without the UIDs of kubelets a running pod may still keep its UID.
        let kubelets = contained_now(&Work::new("", origin.place), || {
            failpoint::work!("UIDs computed");
            KubeletVersion::ALL.map(|version| hash(|hash| pod.dump(version, hash), origin))
        });
        let kubelets = kubelets.unwrap_or_else(|panic| {
            tracing::error!(manifest = origin.place, %panic, "failed to compute the UIDs of kubelets");
            KubeletVersion::ALL.map(|_| former.clone())
        });
        Self { kubelets, former }
    }

    /// Returns these UIDs.
    #[cfg(test)]
    pub(crate) fn of_test(kubelets: [&str; KubeletVersion::ALL.len()], former: &str) -> Self {
        Self { kubelets: kubelets.map(str::to_owned), former: former.to_owned() }
    }

    /// Returns the UID that a kubelet of this version computes.
    #[must_use]
    pub fn of_kubelet(&self, version: KubeletVersion) -> &str {
        let [v1_35, v1_36, v1_37] = &self.kubelets;
        match version {
            KubeletVersion::V1_35 => v1_35,
            KubeletVersion::V1_36 => v1_36,
            KubeletVersion::V1_37 => v1_37,
        }
    }

    /// Returns all UIDs, the former one first, and then those of kubelets from the newest to the oldest.
    pub fn all(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.former).chain(self.kubelets.iter().rev()).map(String::as_str)
    }

    /// Returns the UID of the newest version.
    #[must_use]
    pub fn newest(&self) -> &str {
        self.of_kubelet(KubeletVersion::NEWEST)
    }

    /// Returns the UID that Quintlet computed formerly, which identifies the manifest.
    #[must_use]
    pub fn former(&self) -> &str {
        &self.former
    }

    /// Returns whether a node agent computes this UID for the manifest.
    #[must_use]
    pub fn has(&self, uid: &str) -> bool {
        self.former == uid || self.version_of(uid).is_some()
    }

    /// Returns the version of the kubelet that computes this UID for the manifest.
    #[must_use]
    pub fn version_of(&self, uid: &str) -> Option<KubeletVersion> {
        KubeletVersion::ALL.into_iter().find(|version| uid != self.former && self.of_kubelet(*version) == uid)
    }
}

impl StaticPod<'_> {
    /// Writes the text that a kubelet of this version hashes.
    fn dump(self, version: KubeletVersion, out: &mut dyn std::fmt::Write) {
        dump::dump(&internal::internal(self.pod, self.own_resources, version), version, out);
    }
}

/// Returns the hash of what `dump` writes, and of the origin.
fn hash(dump: impl FnOnce(&mut Fnv128), origin: ManifestOrigin<'_>) -> String {
    let mut hash = Fnv128::new();
    dump(&mut hash);
    match origin.kind {
        SourceKind::Http => {
            hash.write("url:");
            hash.write(origin.place);
        }
        SourceKind::File | SourceKind::Api => {
            hash.write("host:");
            hash.write(origin.node);
            hash.write("file:");
            hash.write(origin.place);
        }
    }
    format!("{:032x}", hash.0)
}

/// FNV-1a of 128 bits (`hash/fnv: New128a`).
struct Fnv128(u128);

impl Fnv128 {
    fn new() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    fn write(&mut self, text: &str) {
        for byte in text.bytes() {
            self.0 ^= u128::from(byte);
            self.0 = self.0.wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }
}

impl std::fmt::Write for Fnv128 {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.write(text);
        Ok(())
    }
}
