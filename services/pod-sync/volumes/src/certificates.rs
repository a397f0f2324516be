//! Trust anchors and certificates of projected volumes.

use async_trait::async_trait;
use k8s_openapi::api::core::v1::ClusterTrustBundleProjection;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

/// Reads certificates of ClusterTrustBundles. Errors are the kubelet's texts.
#[async_trait]
pub trait TrustAnchors: Send + Sync {
    /// Returns the certificates of a ClusterTrustBundle as PEM; nothing for an optional one that does not exist.
    ///
    /// # Errors
    /// The object does not exist, or the objects are not known yet.
    ///
    /// Cancellation safety: a dropped read has no effect.
    async fn by_name(&self, name: &str, is_optional: bool) -> Result<String, String>;

    /// Returns the certificates of all ClusterTrustBundles of a signer that a selector matches, as PEM. Without a selector,
    /// none matches.
    ///
    /// # Errors
    /// No object matches and `is_optional` is not set, the selector is invalid, or the objects are not known yet.
    ///
    /// Cancellation safety: a dropped read has no effect.
    async fn by_signer(
        &self,
        signer: &str,
        selector: Option<&LabelSelector>,
        is_optional: bool,
    ) -> Result<String, String>;
}

/// Returns the certificates of a source as PEM. `anchors` is `None` without an API server, and while the feature gate
/// `ClusterTrustBundleProjection` is off.
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
