//! Trust anchors and certificates of projected volumes.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{ClusterTrustBundleProjection, Pod, PodCertificateProjection};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use quintlet_model::ids::PodUid;

use crate::atomic::Payload;
use crate::payload;

/// Reads certificates of ClusterTrustBundles. Errors are the kubelet's texts.
#[async_trait]
pub trait TrustAnchors: Send + Sync {
    /// Returns the certificates of a ClusterTrustBundle as PEM; nothing for an optional one that does not
    /// exist.
    ///
    /// # Errors
    /// The object does not exist, or the objects are not known yet.
    ///
    /// Cancellation safety: a dropped read has no effect.
    async fn by_name(&self, name: &str, is_optional: bool) -> Result<String, String>;

    /// Returns the certificates of all ClusterTrustBundles of a signer that a selector matches, as PEM.
    /// Without a selector, none matches.
    ///
    /// # Errors
    /// No object matches and `is_optional` is not set, the selector is invalid, or the objects are not known
    /// yet.
    ///
    /// Cancellation safety: a dropped read has no effect.
    async fn by_signer(
        &self,
        signer: &str,
        selector: Option<&LabelSelector>,
        is_optional: bool,
    ) -> Result<String, String>;
}

/// Returns the certificates of a source as PEM. `anchors` is `None` without an API server, and while the
/// feature gate `ClusterTrustBundleProjection` is off.
///
/// # Errors
/// See [`TrustAnchors`].
pub(crate) async fn trust_anchors(
    anchors: Option<&dyn TrustAnchors>,
    source: &ClusterTrustBundleProjection,
) -> Result<String, String> {
    // The kubelet has the same text for both reasons.
    let unsupported = || "ClusterTrustBundle projection is not supported in static kubelet mode".to_owned();
    let is_optional = source.optional == Some(true);
    match (&source.name, &source.signer_name) {
        (Some(name), _) => anchors.ok_or_else(unsupported)?.by_name(name, is_optional).await,
        (None, Some(signer)) => {
            let selector = source.label_selector.as_ref();
            anchors.ok_or_else(unsupported)?.by_signer(signer, selector, is_optional).await
        }
        (None, None) => {
            Err("ClusterTrustBundle projection requires either name or signerName to be set".to_owned())
        }
    }
}

/// A private key and the certificates that were issued for it. The key is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct CredentialBundle {
    /// PKCS#8 as PEM.
    pub key: String,
    /// PEM blocks, that of the key first.
    pub certificates: String,
}

impl fmt::Debug for CredentialBundle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CredentialBundle").field("certificates", &self.certificates).finish_non_exhaustive()
    }
}

/// Keys and certificates of the sources `podCertificate` of pods. No call waits.
pub trait CredentialBundles: Send + Sync {
    /// Returns the key and the certificates of a source, which is number `index` of its volume. The first
    /// call requests the certificate.
    ///
    /// # Errors
    /// There is no certificate, with the kubelet's text.
    fn read(
        &self,
        pod: &Pod,
        uid: &PodUid,
        volume: &str,
        index: usize,
        source: &PodCertificateProjection,
    ) -> Result<Arc<CredentialBundle>, String>;

    /// Returns how often a certificate of the pod was issued or refused. The worker of the pod is woken then.
    fn changes(&self, uid: &PodUid) -> u64;

    /// Drops the keys and certificates of a pod.
    fn forget(&self, uid: &PodUid);
}

/// Returns the files of a source. All are of one key.
pub(crate) fn files_of_bundle(
    pod: &Pod,
    bundle: &CredentialBundle,
    source: &PodCertificateProjection,
    default_mode: i32,
    owner: Option<u32>,
) -> Payload {
    let together = || format!("{}{}", bundle.key, bundle.certificates);
    let files = [
        (&source.credential_bundle_path, together()),
        (&source.key_path, bundle.key.clone()),
        (&source.certificate_chain_path, bundle.certificates.clone()),
    ];
    let files = files.into_iter().filter_map(|(path, content)| {
        let path = path.clone().filter(|path| !path.is_empty())?;
        Some((path, payload::private_file(pod, &content, default_mode, owner)))
    });
    files.collect()
}
