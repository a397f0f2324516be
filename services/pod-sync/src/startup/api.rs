//! Access to the API server.

use std::sync::Arc;

use pod_sync_certificates::{ClusterTrustBundles, PodCertificateContext, PodCertificates};
use pod_sync_clients::WorkerWakeups;
use pod_sync_direct_volumes::certificates::{CredentialBundles, TrustAnchors};
use pod_sync_layout::TokenSource;
use pod_sync_node_certificates::NodeClient;
use pod_sync_objects::ObjectCache;
use pod_sync_sources::api::ClusterView;
use pod_sync_sources::cluster::{ApiSources, Objects, Tokens};
use pod_sync_sources::objects::ManifestObjects;
use pod_sync_volume_manager::objects::{ApiObjects, VolumeObjects};
use quintlet_kit::clock::Clock;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::args::Args;

/// The API server, if there is one, and the objects that pods refer to.
pub(super) struct ApiAccess {
    /// Follows the kubeconfig; none without one.
    pub(super) node_client: Option<NodeClient>,
    /// Whether the name of the node is checked. Requests of `client` wait for it.
    pub(super) name_checked: watch::Sender<bool>,
    /// Client of the API server; none without a kubeconfig.
    pub(super) client: Option<kube::Client>,
    /// The Node, Services and RuntimeClasses of the API server.
    pub(super) cluster: Arc<ClusterView>,
    /// ConfigMaps and Secrets of the API server; none without one.
    pub(super) object_cache: Option<Arc<ObjectCache>>,
    /// ConfigMaps and Secrets of manifests.
    pub(super) manifests: Arc<ManifestObjects>,
}

impl ApiAccess {
    /// Connects to the API server, if there is one. Returns the objects of pods, too.
    pub(super) async fn open(
        args: &Args,
        wakeups: &Arc<WorkerWakeups>,
        clock: &Clock,
        stop: &CancellationToken,
    ) -> anyhow::Result<(Self, Objects)> {
        let node_client = crate::node_client::node_client(args, clock).await?;
        let name_checked = watch::Sender::new(false);
        let client = node_client.as_ref().map(|client| client.client_after(name_checked.subscribe()));
        let manifests = Arc::new(ManifestObjects::new(Arc::clone(wakeups)));
        let cluster = Arc::new(ClusterView::default());
        let detection = (args.config_map_and_secret_change_detection_strategy, args.sync_frequency);
        let sources =
            client.clone().map(|client| ApiSources::new(client, &cluster, detection, wakeups, stop));
        let object_cache = sources.as_ref().map(|sources| Arc::clone(&sources.cache));
        let objects = Objects::new(Arc::clone(&manifests), sources);
        Ok((Self { node_client, name_checked, client, cluster, object_cache, manifests }, objects))
    }

    pub(super) fn tokens(&self) -> Option<Arc<dyn TokenSource>> {
        self.client.clone().map(|client| Arc::new(Tokens::new(client)) as Arc<dyn TokenSource>)
    }

    /// Returns the ClusterTrustBundles, if there is an API server and the feature gate is on.
    pub(super) fn trust_anchors(
        &self,
        args: &Args,
        stop: &CancellationToken,
    ) -> Option<Arc<dyn TrustAnchors>> {
        let client = self.client.clone().filter(|_| args.resources.projects_trust_bundles())?;
        Some(Arc::new(ClusterTrustBundles::new(client, stop.clone())))
    }

    /// Returns the keys and certificates of pods, if there is an API server and the feature gate is on.
    pub(super) fn credentials(
        &self,
        args: &Args,
        inputs: PodCertificateContext,
        stop: &CancellationToken,
    ) -> Option<Arc<dyn CredentialBundles>> {
        let client = self.client.clone().filter(|_| args.resources.projects_pod_certificates())?;
        Some(PodCertificates::start(client, inputs, stop.clone()))
    }

    pub(super) fn volume_objects(&self) -> Option<Arc<dyn VolumeObjects>> {
        self.client.clone().map(|client| Arc::new(ApiObjects(client)) as Arc<dyn VolumeObjects>)
    }
}
