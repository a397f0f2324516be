//! The pods whose logs and volumes are looked after, and the service Storage of podsync.v1.

use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use pod_sync_containment::{Containment, PodWork};
use pod_sync_storage::{Measurement, Pods};
use quintlet_kit::task::blocking;
use quintlet_model::ids::PodUid;
use quintlet_model::runtime::SharedPodRuntime;
use quintlet_proto::podsync::v1 as wire;
use quintlet_proto::podsync::v1::storage_server::Storage;
use tonic::{Request, Response, Status};

use crate::context::Context;
use crate::serve::Service;

#[async_trait]
impl Pods for Context {
    fn running(&self) -> Vec<(PodUid, Arc<Pod>)> {
        let views = self.views.all().into_iter().filter(|view| !self.is_over(&view.pod_ref.uid));
        views.map(|view| (view.pod_ref.uid.clone(), Arc::clone(&view.pod))).collect()
    }

    async fn measure(&self, uid: &PodUid, pod: &Pod, measurement: Measurement) -> Option<wire::PodStorage> {
        let work = PodWork::of(&quintlet_model::pod::pod_ref(pod).ok()?);
        if self.containment.wait(uid).is_some() {
            return None;
        }
        self.contained(&work, blocking(measurement)).await
    }
}

impl pod_sync_logs::Pods for Context {
    fn pods(&self) -> Option<Vec<SharedPodRuntime>> {
        Some(self.pleg.all()?.into_iter().filter(|pod| self.is_ours(pod)).collect())
    }

    fn containment(&self) -> &Containment {
        &self.containment
    }
}

#[async_trait]
impl Storage for Service {
    async fn list(
        &self,
        _: Request<wire::ListStorageRequest>,
    ) -> Result<Response<wire::ListStorageReply>, Status> {
        let measured = &self.ctx.measured;
        let runtime = measured.runtime_file_systems(|| self.ctx.runtime.file_systems()).await;
        Ok(Response::new(wire::ListStorageReply { pods: measured.all(), runtime }))
    }
}
