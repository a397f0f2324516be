//! The connections that operations use, and their reads of credentials.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use pod_sync_clients::Events;
use pod_sync_csi::mount::Mounter;
use pod_sync_csi::paths::Root;
use pod_sync_csi::volume::Secrets;
use pod_sync_layout::{TokenCache, TokenSource};
use quintlet_kit::clock::Clock;
use tokio::sync::watch;

use crate::claims::SecretName;
use crate::metrics::Metrics;
use crate::objects::VolumeObjects;
use crate::selinux::FileLabel;

/// The connections and caches that operations use.
pub(crate) struct Tools {
    pub(crate) mounter: Mounter,
    pub(crate) in_tree: pod_sync_in_tree::mount::Mounter,
    /// A controller marks disks as attached.
    pub(crate) controller_attaches: bool,
    pub(crate) root: Root,
    pub(crate) node: String,
    pub(crate) objects: Option<Arc<dyn VolumeObjects>>,
    pub(crate) tokens: Option<Arc<dyn TokenSource>>,
    pub(crate) token_cache: TokenCache,
    pub(crate) clock: Clock,
    /// Label of containers' files; `None` on a machine without SELinux.
    pub(crate) file_label: Option<FileLabel>,
    /// Boxed: futures that hold the tools stay small.
    pub(crate) metrics: Box<Metrics>,
    /// Events of pods and claims.
    pub(crate) events: Events,
    /// The Node object, as it changes.
    pub(crate) nodes: watch::Receiver<Option<Arc<Node>>>,
}

/// A Secret that could not be read.
#[derive(Debug)]
pub(crate) struct SecretError {
    pub(crate) name: SecretName,
    pub(crate) error: String,
}

/// Reads credentials; none without a name.
pub(crate) async fn secrets(tools: &Tools, name: Option<&SecretName>) -> Result<Secrets, SecretError> {
    let (Some(secret), Some(objects)) = (name, &tools.objects) else { return Ok(Secrets::default()) };
    let data = objects.secret(&secret.namespace, &secret.name).await;
    data.map(Secrets).map_err(|error| SecretError { name: secret.clone(), error: error.to_string() })
}
