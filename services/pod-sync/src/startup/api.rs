//! Access to the API server.

use std::sync::Arc;

use pod_sync_certificates::{ClusterTrustBundles, PodCertificateContext, PodCertificates};
use pod_sync_clients::WorkerWakeups;
use pod_sync_direct_volumes::certificates::{CredentialBundles, TrustAnchors};
use pod_sync_layout::{ObjectSource, TokenSource};
use pod_sync_node_certificates::NodeClient;
use pod_sync_objects::ObjectCache;
use pod_sync_offline::{OfflineCache, WithOffline};
use pod_sync_sources::api::ClusterView;
use pod_sync_sources::cluster::{ApiSources, Objects, Tokens};
use pod_sync_sources::objects::ManifestObjects;
use pod_sync_volume_manager::objects::{ApiObjects, VolumeObjects};
use quintlet_kit::args::paths::Paths;
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
    /// The offline cache; none if it is off.
    pub(super) offline: Option<Arc<OfflineCache>>,
}

impl ApiAccess {
    /// Connects to the API server, if there is one. Returns the objects of pods, too.
    pub(super) async fn open(
        args: &Args,
        paths: &Paths,
        wakeups: &Arc<WorkerWakeups>,
        clock: &Clock,
        stop: &CancellationToken,
    ) -> anyhow::Result<(Self, Objects)> {
        let node_client = crate::node_client::node_client(args, clock).await?;
        let name_checked = watch::Sender::new(false);
        let client = node_client.as_ref().map(|client| client.client_after(name_checked.subscribe()));
        let offline = client.as_ref().and_then(|_| {
            args.offline.open(&args.root_dir, paths, &args.node.node_name(), clock).map(Arc::new)
        });
        let client = match &offline {
            Some(offline) => client.map(|client| offline.contact().observing(&client)),
            None => client,
        };
        let manifests = Arc::new(ManifestObjects::new(Arc::clone(wakeups)));
        let cluster = Arc::new(ClusterView::with_lists(&paths.state_dir()));
        let detection = (args.config_map_and_secret_change_detection_strategy, args.sync_frequency);
        let sources =
            client.clone().map(|client| ApiSources::new(client, &cluster, detection, wakeups, stop));
        let object_cache = sources.as_ref().map(|sources| Arc::clone(&sources.cache));
        let objects = Objects::new(Arc::clone(&manifests), sources);
        let access = Self { node_client, name_checked, client, cluster, object_cache, manifests, offline };
        Ok((access, objects))
    }

    pub(super) fn tokens(&self) -> Option<Arc<dyn TokenSource>> {
        let tokens: Arc<dyn TokenSource> = Arc::new(Tokens::new(self.client.clone()?));
        let Some(offline) = &self.offline else { return Some(tokens) };
        Some(Arc::new(WithOffline::new(tokens, Arc::clone(offline))))
    }

    pub(super) fn with_offline(&self, objects: Arc<dyn ObjectSource>) -> Arc<dyn ObjectSource> {
        match &self.offline {
            Some(offline) => Arc::new(WithOffline::new(objects, Arc::clone(offline))),
            None => objects,
        }
    }

    /// Returns the ClusterTrustBundles, if there is an API server and the feature gate is on.
    pub(super) fn trust_anchors(
        &self,
        args: &Args,
        stop: &CancellationToken,
    ) -> Option<Arc<dyn TrustAnchors>> {
        let client = self.client.clone().filter(|_| args.resources.projects_trust_bundles())?;
        let bundles: Arc<dyn TrustAnchors> = Arc::new(ClusterTrustBundles::new(client, stop.clone()));
        let Some(offline) = &self.offline else { return Some(bundles) };
        Some(Arc::new(WithOffline::new(bundles, Arc::clone(offline))))
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
        let objects: Arc<dyn VolumeObjects> = Arc::new(ApiObjects(self.client.clone()?));
        let Some(offline) = &self.offline else { return Some(objects) };
        Some(Arc::new(WithOffline::new(objects, Arc::clone(offline))))
    }
}
