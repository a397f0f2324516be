//! The services `v1.PodResourcesLister` and `v1alpha1.PodResourcesLister`, with the limits of their clients.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use pod_sync_views::PodView;
use quintlet_kit::clock::Clock;
use quintlet_kit::rate::{Rate, RateLimiter};
use quintlet_kit::task;
use quintlet_model::ids::PodUid;
use quintlet_model::pod::is_terminal_phase;
use quintlet_pod_resources_api::v1::pod_resources_lister_server::PodResourcesLister;
use quintlet_pod_resources_api::v1alpha1::pod_resources_lister_server::PodResourcesLister as AlphaLister;
use quintlet_pod_resources_api::{v1, v1alpha1};
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};

use crate::answers::{AnswerTooLarge, HeldResources, MOST_BYTES, bounded};
use crate::metrics::{ApiMetrics, ApiVersion};

/// Calls per second, and their burst (`pkg/kubelet/apis/podresources: DefaultQPS`, `DefaultBurstTokens`).
const CALLS: u32 = 100;
const BURST: u32 = 10;
/// Wait before a call beyond the rate is rejected, so that a client that repeats it at once does not keep a
/// processor busy.
const REJECTION: Duration = Duration::from_millis(50);

/// The pods of the node.
#[async_trait]
pub trait PodSource: Send + Sync + fmt::Debug {
    /// Returns all pods. After a restart, waits a while for those of before.
    async fn pods(&self) -> Vec<Arc<PodView>>;

    /// Returns whether the containers of a pod have ended for good.
    fn has_terminated(&self, uid: &PodUid) -> bool;

    /// Returns whether the termination of a pod was requested.
    fn is_ending(&self, uid: &PodUid) -> bool;
}

/// The PodResources API. Clones share its limits.
#[derive(Debug, Clone)]
pub struct PodResourcesApi {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    pods: Arc<dyn PodSource>,
    held: HeldResources,
    clock: Clock,
    limiter: Mutex<Option<RateLimiter>>,
    /// One answer is made at a time, on a thread for blocking work: a list of many devices takes
    /// milliseconds.
    making: Arc<Semaphore>,
    metrics: ApiMetrics,
}

impl PodResourcesApi {
    /// Returns the service.
    #[must_use]
    pub fn new(pods: Arc<dyn PodSource>, held: HeldResources, clock: Clock) -> Self {
        let limiter = Mutex::new(Rate::new(CALLS, BURST).map(RateLimiter::new));
        let making = Arc::new(Semaphore::new(1));
        let metrics = ApiMetrics::default();
        Self { shared: Arc::new(Shared { pods, held, clock, limiter, making, metrics }) }
    }

    /// Takes a call of the rate. A rejected call is not counted, as in the kubelet.
    async fn take_call(&self, version: ApiVersion) -> Result<(), Status> {
        let now = self.shared.clock.boot();
        if self.shared.limiter.lock().as_mut().is_none_or(|limiter| limiter.try_take(now)) {
            self.shared.metrics.requested(version);
            return Ok(());
        }
        tokio::time::sleep(REJECTION).await;
        Err(Status::resource_exhausted("rejected by rate limit"))
    }

    /// Returns the pods that have not ended (`GetActivePods`).
    async fn active_pods(&self) -> Vec<Arc<PodView>> {
        let mut pods = self.shared.pods.pods().await;
        pods.retain(|view| self.is_active(view));
        pods
    }

    /// Returns whether a pod may hold resources (`isPodInactive`). A pod in a terminal phase holds none,
    /// unless its containers are being stopped.
    fn is_active(&self, view: &PodView) -> bool {
        let uid = &view.pod_ref.uid;
        let status = view.status.as_deref().or(view.pod.status.as_ref());
        let is_terminal = is_terminal_phase(status.and_then(|status| status.phase.as_deref()));
        !self.shared.pods.has_terminated(uid) && (!is_terminal || self.shared.pods.is_ending(uid))
    }

    /// Returns the pod of this name; the latest one, if an earlier one has not ended.
    async fn pod(&self, namespace: &str, name: &str) -> Result<Arc<PodView>, Status> {
        let active = self.active_pods().await.into_iter();
        let named =
            active.filter(|view| *view.pod_ref.namespace == *namespace && *view.pod_ref.name == *name);
        let latest = named.max_by_key(|view| (!view.is_removed, view.created_unix_ns));
        // The code of an error in Go.
        latest.ok_or_else(|| Status::unknown(format!("pod {name} in namespace {namespace} not found")))
    }

    async fn make<T: Send + 'static>(
        &self,
        make: impl FnOnce(&HeldResources) -> Result<T, AnswerTooLarge> + Send + 'static,
    ) -> Result<T, Status> {
        let permit = Arc::clone(&self.shared.making).acquire_owned().await;
        let shared = Arc::clone(&self.shared);
        let made = task::blocking(move || {
            let made = make(&shared.held);
            drop(permit);
            made
        });
        made.await.map_err(|AnswerTooLarge| {
            Status::resource_exhausted(format!("the answer has more than {MOST_BYTES} bytes"))
        })
    }

    async fn list_all(&self) -> Result<v1::ListPodResourcesResponse, Status> {
        let pods = self.active_pods().await;
        let made = self.make(move |held| bounded(pods.iter().map(|view| held.of_pod(view))));
        Ok(v1::ListPodResourcesResponse { pod_resources: made.await? })
    }

    async fn get_one(
        &self,
        request: v1::GetPodResourcesRequest,
    ) -> Result<v1::GetPodResourcesResponse, Status> {
        let view = self.pod(&request.pod_namespace, &request.pod_name).await?;
        let mut made = self.make(move |held| bounded(std::iter::once(held.of_pod(&view)))).await?;
        Ok(v1::GetPodResourcesResponse { pod_resources: made.pop() })
    }
}

#[async_trait]
impl PodResourcesLister for PodResourcesApi {
    async fn list(
        &self,
        _: Request<v1::ListPodResourcesRequest>,
    ) -> Result<Response<v1::ListPodResourcesResponse>, Status> {
        self.take_call(ApiVersion::V1).await?;
        let counted = &self.shared.metrics.lists;
        counted.requested();
        self.list_all().await.map(Response::new).inspect_err(|_| counted.failed())
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<v1::AllocatableResourcesRequest>,
    ) -> Result<Response<v1::AllocatableResourcesResponse>, Status> {
        self.take_call(ApiVersion::V1).await?;
        let counted = &self.shared.metrics.allocatable;
        counted.requested();
        let made = self.make(HeldResources::allocatable).await;
        made.map(Response::new).inspect_err(|_| counted.failed())
    }

    async fn get(
        &self,
        request: Request<v1::GetPodResourcesRequest>,
    ) -> Result<Response<v1::GetPodResourcesResponse>, Status> {
        self.take_call(ApiVersion::V1).await?;
        let counted = &self.shared.metrics.gets;
        counted.requested();
        self.get_one(request.into_inner()).await.map(Response::new).inspect_err(|_| counted.failed())
    }
}

#[async_trait]
impl AlphaLister for PodResourcesApi {
    /// Lists all pods, also those that have ended, as the kubelet does in this version.
    async fn list(
        &self,
        _: Request<v1alpha1::ListPodResourcesRequest>,
    ) -> Result<Response<v1alpha1::ListPodResourcesResponse>, Status> {
        self.take_call(ApiVersion::V1Alpha1).await?;
        let pods = self.shared.pods.pods().await;
        let made = self.make(move |held| bounded(pods.iter().map(|view| held.of_pod_alpha(view))));
        let pod_resources = made.await?;
        Ok(Response::new(v1alpha1::ListPodResourcesResponse { pod_resources }))
    }
}

#[cfg(test)]
mod tests;
