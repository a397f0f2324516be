//! The pods whose logs and volumes are maintained, and the service Storage of podsync.v1.

use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::{Pleg, Runtime};
use pod_sync_containment::Containment;
use pod_sync_volume_usage::{Measured, Pods};
use quintlet_kit::messages::{self, Bounded};
use quintlet_model::ids::PodUid;
use quintlet_model::runtime::SharedPodRuntime;
use quintlet_proto::podsync::v1 as wire;
use quintlet_proto::podsync::v1::storage_server::Storage;
use tonic::{Request, Response, Status};

use pod_sync_worker::context::{FaultIsolation, NodeConfig, Reporting, WorkerControl};

/// The pods whose volumes are counted and measured.
pub(crate) struct MeasuredPods {
    pub(crate) reporting: Arc<Reporting>,
    pub(crate) control: Arc<WorkerControl>,
    pub(crate) faults: Arc<FaultIsolation>,
}

impl Pods for MeasuredPods {
    fn running(&self) -> Vec<(PodUid, Arc<Pod>)> {
        let views = &self.reporting.views;
        let is_over = |uid: &PodUid| self.control.pod_workers.has_terminated(views, uid);
        let running = views.all().into_iter().filter(|view| !is_over(&view.pod_ref.uid));
        running.map(|view| (view.pod_ref.uid.clone(), Arc::clone(&view.pod))).collect()
    }

    fn measure<T>(&self, uid: &PodUid, measurement: impl FnOnce() -> T) -> Option<T> {
        self.faults.unless_suspended(uid, measurement)
    }
}

/// The pods whose container logs are rotated and linked.
pub(crate) struct LoggedPods {
    pub(crate) node: Arc<NodeConfig>,
    pub(crate) pleg: Arc<Pleg>,
    pub(crate) faults: Arc<FaultIsolation>,
}

impl pod_sync_logs::Pods for LoggedPods {
    fn pods(&self) -> Option<Vec<SharedPodRuntime>> {
        Some(self.pleg.all()?.into_iter().filter(|pod| self.node.is_ours(pod)).collect())
    }

    fn containment(&self) -> &Containment {
        &self.faults.containment
    }
}

/// Lists the measured disk usage.
#[derive(Debug)]
pub(crate) struct StorageLists {
    pub(crate) measured: Arc<Measured>,
    pub(crate) calls: Runtime,
}

#[async_trait]
impl Storage for StorageLists {
    type ListStream = Bounded<wire::ListStorageReply>;

    async fn list(&self, _: Request<wire::ListStorageRequest>) -> Result<Response<Self::ListStream>, Status> {
        let Self { measured, calls } = self;
        let mount_points = || async { Ok(calls.mount_points().await?.distinct()) };
        let runtime = messages::chunks(measured.runtime_file_systems(mount_points).await);
        let runtime = runtime.map(|runtime| wire::ListStorageReply { pods: Vec::new(), runtime });
        let pods = messages::chunks(measured.all());
        let pods = pods.map(|pods| wire::ListStorageReply { pods, runtime: Vec::new() });
        Ok(Response::new(Bounded::of_chunks("Storage.List", runtime.chain(pods))))
    }
}
