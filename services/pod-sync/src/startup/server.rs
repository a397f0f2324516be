//! Serves podsync.v1 and the metrics.

use std::sync::Arc;

use anyhow::Context as _;
use async_trait::async_trait;
use futures::FutureExt as _;
use pod_sync_pod_resources::{HeldResources, PodResourcesApi, PodSource};
use pod_sync_views::PodView;
use pod_sync_volume_usage::Measured;
use pod_sync_worker::context::{Reporting, WorkerContext, WorkerControl};
use quintlet_kit::args::paths::Paths;
use quintlet_kit::server::{HealthHandle, OFFLINE_CACHE, SYNC_LOOP, Server};
use quintlet_kit::socket::{PeerPolicy, bind_unix};
use quintlet_kit::task::spawn;
use quintlet_model::ids::PodUid;
use quintlet_proto::podsync::v1::checkpoints_server::CheckpointsServer;
use quintlet_proto::podsync::v1::claims_server::ClaimsServer;
use quintlet_proto::podsync::v1::cpus_server::CpusServer;
use quintlet_proto::podsync::v1::devices_server::DevicesServer;
use quintlet_proto::podsync::v1::pod_sync_server::PodSyncServer;
use quintlet_proto::podsync::v1::pressure_server::PressureServer;
use quintlet_proto::podsync::v1::storage_server::StorageServer;
use quintlet_proto::podsync::v1::volumes_server::VolumesServer;
use quintlet_proto::subscribe::v1::pods_server::PodsServer;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::api::ApiAccess;
use super::claims::NodeSlices;
use super::process_tasks::ProcessTasks;
use crate::args::Args;
use crate::checkpoint::ContainerCheckpoints;
use crate::claims::ClaimLists;
use crate::cpus::CpuLists;
use crate::devices::DeviceLists;
use crate::exclusive::PlacedResources;
use crate::pods_api;
use crate::pressure::{EvictionRounds, PressureReports};
use crate::serve::PodService;
use crate::storage::StorageLists;
use crate::subscribe::{self, PodJournal, PodsService};
use crate::volumes::VolumeLists;

/// The pods of this node, by their views and workers.
#[derive(Debug)]
struct Pods {
    reporting: Arc<Reporting>,
    control: Arc<WorkerControl>,
}

#[async_trait]
impl PodSource for Pods {
    async fn pods(&self) -> Vec<Arc<PodView>> {
        self.reporting.views.restored().await;
        self.reporting.views.all()
    }

    fn has_terminated(&self, uid: &PodUid) -> bool {
        self.control.pod_workers.has_terminated(&self.reporting.views, uid)
    }

    fn is_ending(&self, uid: &PodUid) -> bool {
        self.control.pod_workers.is_ending(uid)
    }
}

/// Reports whether pods run that the API server has not confirmed.
async fn report_offline(mut unconfirmed: watch::Receiver<usize>, health: HealthHandle) {
    loop {
        let pods = *unconfirmed.borrow_and_update();
        if pods == 0 {
            health.set_serving(OFFLINE_CACHE).await;
        } else {
            health.set_not_serving(OFFLINE_CACHE).await;
        }
        // The sender lives as long as this process.
        if unconfirmed.changed().await.is_err() {
            return;
        }
    }
}

/// Starts the servers of pod-sync.
pub(crate) struct Servers<'a> {
    pub(super) tasks: &'a ProcessTasks,
    pub(super) ctx: &'a Arc<WorkerContext>,
    pub(super) args: &'a Args,
    pub(super) paths: &'a Paths,
    pub(super) api: &'a ApiAccess,
    pub(super) measured: &'a Arc<Measured>,
}

impl Servers<'_> {
    /// Starts the server of podsync.v1. Returns its task and the handle of its health service.
    pub(crate) async fn serve(
        &self,
        rounds: Option<EvictionRounds>,
    ) -> anyhow::Result<(JoinHandle<Result<(), tonic::transport::Error>>, HealthHandle)> {
        let ctx = self.ctx;
        let path = self.paths.podsync();
        let listener = bind_unix(&path, 0o660).with_context(|| format!("{}", path.display()))?;
        let peers = PeerPolicy::root_and_self().and(&self.args.allow_uid);
        let volumes = VolumeLists {
            clock: ctx.clock.clone(),
            reporting: Arc::clone(&ctx.reporting),
            volume_tasks: ctx.environment.volume_tasks.clone(),
        };
        let pods = PodService {
            node: Arc::clone(&ctx.node),
            reporting: Arc::clone(&ctx.reporting),
            control: Arc::clone(&ctx.control),
            faults: Arc::clone(&ctx.faults),
            volumes: volumes.clone(),
            offline: ctx.environment.offline.clone(),
        };
        let checkpoints = ContainerCheckpoints {
            clock: ctx.clock.clone(),
            node: Arc::clone(&ctx.node),
            runtime: ctx.runtime.clone(),
            reporting: Arc::clone(&ctx.reporting),
        };
        let pressure = PressureReports { clock: ctx.clock.clone(), rounds };
        let storage = StorageLists { measured: Arc::clone(self.measured), calls: ctx.runtime.calls.clone() };
        let devices = ctx.environment.devices.clone();
        let devices = DeviceLists { devices, reporting: Arc::clone(&ctx.reporting) };
        let claims = ctx.environment.claims.clone();
        let claims = ClaimLists { claims, reporting: Arc::clone(&ctx.reporting) };
        let placement = ctx.environment.placement.clone();
        let cpus = CpuLists { placement, reporting: Arc::clone(&ctx.reporting) };
        let server = Server::new("pod-sync")
            .observers(&self.args.common.observer_uid)
            .add_service(PodSyncServer::new(pods))
            .add_service(CheckpointsServer::new(checkpoints))
            .add_service(PressureServer::new(pressure))
            .add_service(StorageServer::new(storage))
            .add_service(VolumesServer::new(volumes))
            .add_service(DevicesServer::new(devices))
            .add_service(CpusServer::new(cpus))
            .add_service(ClaimsServer::new(claims));
        let health = server.health();
        health.set_serving(SYNC_LOOP).await;
        if let Some(offline) = &ctx.environment.offline {
            let report = report_offline(offline.starts_seen(), health.clone());
            let stop = self.tasks.stop.clone();
            self.tasks.spawn("offline-health", stop.run_until_cancelled_owned(report).map(drop));
        }
        Ok((spawn("server", server.serve(listener, peers, self.tasks.stop.clone())), health))
    }

    /// Serves the Pods API on its socket in the root directory, if the feature gate is on.
    ///
    /// # Errors
    /// The socket cannot be created.
    pub(crate) fn serve_pods_api(&self) -> anyhow::Result<()> {
        if !self.args.resources.serves_pods_api() {
            return Ok(());
        }
        let path = pods_api::socket(&self.args.root_dir);
        let listener = bind_unix(&path, 0o600).with_context(|| format!("{}", path.display()))?;
        let service = pods_api::PodsApi::new(Arc::clone(&self.ctx.reporting), self.ctx.clock.clone());
        let server = pods_api::serve(service, listener, self.tasks.stop.clone());
        self.tasks.spawn("pods-api", async move {
            if let Err(error) = server.await {
                tracing::error!(%error, "failed to serve the Pods API");
            }
        });
        Ok(())
    }

    /// Serves the states of pods to the configured subscribers.
    pub(crate) fn serve_subscribers(&self) {
        let args = &self.args.subscribers;
        if args.is_empty() {
            return;
        }
        let journal = Arc::new(PodJournal::new(&self.ctx.clock));
        let publishing = subscribe::publish(Arc::clone(&self.ctx.reporting), Arc::clone(&journal));
        self.tasks
            .spawn("publish-pods", self.tasks.stop.clone().run_until_cancelled_owned(publishing).map(drop));
        let pods = PodsServer::new(PodsService::new(journal, self.tasks.stop.clone()));
        quintlet_kit::subscribe::serve(&self.paths.podsync_subscribers(), args, &self.tasks.stop, |server| {
            server.add_service(pods)
        });
    }

    /// Serves the PodResources API on its socket in the root directory.
    ///
    /// # Errors
    /// The socket cannot be created, or another process serves it.
    pub(crate) fn serve_pod_resources(&self) -> anyhow::Result<()> {
        let ctx = self.ctx;
        let listener = pod_sync_pod_resources::listen(&self.args.root_dir)
            .context("failed to create the socket of the PodResources API")?;
        let held = HeldResources {
            devices: ctx.environment.devices.clone(),
            claims: ctx.environment.claims.clone(),
            exclusive: Arc::new(PlacedResources(ctx.environment.placement.clone())),
        };
        let pods = Pods { reporting: Arc::clone(&ctx.reporting), control: Arc::clone(&ctx.control) };
        let api = PodResourcesApi::new(Arc::new(pods), held, ctx.clock.clone());
        let server = api.serve(listener, self.tasks.stop.clone());
        self.tasks.spawn("pod-resources", async move {
            if let Err(error) = server.await {
                tracing::error!(%error, "failed to serve the PodResources API");
            }
        });
        Ok(())
    }

    /// Serves the registration of device plugins, and removes the resources of those that stay away.
    ///
    /// # Errors
    /// The socket cannot be created.
    pub(crate) fn serve_device_plugins(&self) -> anyhow::Result<()> {
        let devices = self.ctx.environment.devices.clone();
        let listener = devices.listen().context("failed to create the socket of device plugins")?;
        self.tasks.spawn("device-expiry", devices.clone().expire_resources());
        let server = devices.serve(listener, self.tasks.stop.clone());
        self.tasks.spawn("device-plugins", async move {
            if let Err(error) = server.await {
                tracing::error!(%error, "failed to serve the registration of device plugins");
            }
        });
        Ok(())
    }

    /// Removes the ResourceSlices of DRA drivers that stay away, if there is an API server.
    pub(crate) fn wipe_resource_slices(&self) {
        let Some(client) = self.api.client.clone() else { return };
        let node = self.ctx.node.settings.node_name.clone();
        let claims = self.ctx.environment.claims.clone();
        self.tasks.spawn("wipe-slices", claims.wipe_slices(Arc::new(NodeSlices { client, node })));
    }

    /// Serves metrics over HTTP if the command line asks for it.
    pub(crate) fn serve_metrics(&self) {
        let Some(address) = self.args.common.metrics_listen else { return };
        let serve = quintlet_kit::server::serve_metrics(address, self.tasks.stop.clone());
        self.tasks.spawn("metrics", async move {
            if let Err(error) = serve.await {
                tracing::error!(%error, %address, "failed to serve metrics");
            }
        });
    }
}
