//! Runs calls of the runtime service: they are recorded, follow the script, and change the state.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use prost::Message;
use quintlet_cri_api::v1;
use tonic::{Request, Response, Status};

use super::event_bus::Event;
use super::events;
use super::script::{CallScript, Method};
use super::shared::Shared;
use super::world::{self, StopReply, no_container, no_sandbox};

/// Bytes of a request, including fields of a later CRI.
#[derive(Clone)]
pub(super) struct Raw(pub(super) Bytes);

/// Ends the count of a call in flight when dropped.
pub(super) struct Leave(pub(super) Arc<Shared>, pub(super) Method);

impl Drop for Leave {
    fn drop(&mut self) {
        self.0.script.leave(self.1);
    }
}

/// A name reserved by a call in flight, released if the call fails.
struct Reserved(Arc<Shared>, String);

impl Drop for Reserved {
    fn drop(&mut self) {
        self.0.world.lock().release_unmade(&self.1);
    }
}

impl Shared {
    /// Records a call, follows the script and executes it. `act` reports when it has passed the script's
    /// delays.
    pub(crate) async fn call<Q, R, F>(
        self: &Arc<Self>,
        method: Method,
        request: Request<Q>,
        subjects: Vec<String>,
        act: impl FnOnce(Arc<Self>, CallScript, Q) -> F,
    ) -> Result<Response<R>, Status>
    where
        Q: Message,
        R: Send + 'static,
        F: Future<Output = (CallScript, Result<R, Status>)> + Send + 'static,
    {
        let raw = request.extensions().get::<Raw>().map(|raw| raw.0.clone());
        let bytes = raw.unwrap_or_else(|| Bytes::from(request.get_ref().encode_to_vec()));
        let (metadata, _, request) = request.into_parts();
        let plan = self.script.enter(method, metadata, subjects, bytes);
        let leave = Leave(Arc::clone(self), method);
        let act = act(Arc::clone(self), plan, request);
        let work = async move {
            let (plan, result) = act.await;
            drop(leave);
            if !plan.answer_latency.is_zero() {
                tokio::time::sleep(plan.answer_latency).await;
            }
            match plan.after {
                Some(status) => Err(status),
                None => result,
            }
        };
        let result = if self.finish_abandoned.load(Ordering::Relaxed) {
            crate::spawn(work).await.unwrap_or_else(|e| Err(Status::internal(e.to_string())))
        } else {
            work.await
        };
        result.map(Response::new)
    }

    /// Executes a call at once after the script's delays.
    pub(crate) async fn simple<Q: Message + Send + 'static, R: Send + 'static>(
        self: &Arc<Self>,
        method: Method,
        request: Request<Q>,
        subjects: impl FnOnce(&Q) -> Vec<String>,
        act: impl FnOnce(&Arc<Self>, Q) -> Result<R, Status> + Send + 'static,
    ) -> Result<Response<R>, Status> {
        let subjects = subjects(request.get_ref());
        self.call(method, request, subjects, |shared, mut plan, q| async move {
            let result = match shared.script.pass(&mut plan).await {
                Ok(()) => act(&shared, q),
                Err(status) => Err(status),
            };
            (plan, result)
        })
        .await
    }

    pub(super) async fn run_sandbox(
        self: &Arc<Self>,
        plan: &mut CallScript,
        q: v1::RunPodSandboxRequest,
    ) -> Result<String, Status> {
        let config = q.config.ok_or_else(|| Status::invalid_argument("sandbox config is nil"))?;
        let id = self.world.lock().next_id();
        self.world.lock().reserve("sandbox", &world::sandbox_name(&config), &id)?;
        let _reserved = Reserved(Arc::clone(self), id.clone());
        self.script.pass(plan).await?;
        self.world.lock().insert_sandbox(id.clone(), config, &q.runtime_handler);
        self.touch();
        self.sandbox_events(&id);
        Ok(id)
    }

    pub(super) async fn create(
        self: &Arc<Self>,
        plan: &mut CallScript,
        q: v1::CreateContainerRequest,
    ) -> Result<String, Status> {
        let config = q.config.ok_or_else(|| Status::invalid_argument("container config is nil"))?;
        let id = {
            let mut world = self.world.lock();
            let sandbox =
                world.sandboxes.get(&q.pod_sandbox_id).ok_or_else(|| no_sandbox(&q.pod_sandbox_id))?;
            if !sandbox.ready() {
                return Err(Status::unknown(format!("sandbox {:?} is not running", q.pod_sandbox_id)));
            }
            let image = config.image.as_ref().map_or("", |i| &i.image);
            if world.image(image).is_none() {
                return Err(Status::not_found(format!("failed to resolve image {image:?}: not found")));
            }
            let id = world.next_id();
            let name = world.container_name(&q.pod_sandbox_id, &config);
            world.reserve("container", &name, &id)?;
            id
        };
        let _reserved = Reserved(Arc::clone(self), id.clone());
        self.script.pass(plan).await?;
        self.world.lock().insert_container(id.clone(), &q.pod_sandbox_id, config);
        self.touch();
        self.bus.containerd(Event::Created { id: id.clone() });
        self.cri_event(&id, v1::ContainerEventType::ContainerCreatedEvent);
        Ok(id)
    }

    /// Sends the stop signal, waits for the grace period and kills the container. Returns once the CRI state
    /// is exited.
    pub(super) async fn stop_container(self: &Arc<Self>, id: &str, timeout: Duration) {
        if !self.world.lock().containers.get(id).is_some_and(|c| c.running()) {
            return;
        }
        let (after, code) = match self.world.lock().behaviour_of(id).stop {
            StopReply::Exits { after, code } if after < timeout || after.is_zero() => (after, code),
            StopReply::Exits { .. } | StopReply::Ignores => (timeout, 137),
        };
        let stopped = |w: &world::World| !w.containers.get(id).is_some_and(|c| c.running());
        // The container may exit by itself.
        if tokio::time::timeout(after, self.wait_world(stopped)).await.is_err() {
            self.exit(id, code, None);
        }
        self.wait_world(stopped).await;
    }

    pub(super) async fn stop_sandbox(self: &Arc<Self>, id: &str) {
        let containers = self.world.lock().containers_of(id);
        for container in containers {
            self.exit(&container, 137, None);
        }
        self.exit(id, 137, None);
        self.wait_world(|w| !w.sandboxes.get(id).is_some_and(|s| s.ready())).await;
    }

    pub(super) async fn exec_sync(
        self: &Arc<Self>,
        q: v1::ExecSyncRequest,
    ) -> Result<v1::ExecSyncResponse, Status> {
        let (state, exec_id) = {
            let mut world = self.world.lock();
            let state = world.containers.get(&q.container_id).map(|c| c.status.state());
            (state.ok_or_else(|| no_container(&q.container_id))?, world.next_id())
        };
        if state != v1::ContainerState::ContainerRunning {
            return Err(Status::unknown(format!("container is in {} state", state.as_str_name())));
        }
        let handler = Arc::clone(&self.exec.lock());
        let reply = handler(&q.container_id, &q.cmd);
        let limit = u64::try_from(q.timeout).ok().filter(|s| *s > 0).map(Duration::from_secs);
        if let Some(limit) = limit.filter(|l| reply.after > *l) {
            events::exec_exit(self, &q.container_id, &exec_id, limit, 137).await;
            let text =
                format!("failed to exec in container: timeout {limit:?} exceeded: context deadline exceeded");
            return Err(Status::deadline_exceeded(text));
        }
        events::exec_exit(self, &q.container_id, &exec_id, reply.after, reply.exit_code).await;
        Ok(v1::ExecSyncResponse { stdout: reply.stdout, stderr: reply.stderr, exit_code: reply.exit_code })
    }

    pub(super) fn streaming_url(&self, what: &str) -> Result<String, Status> {
        match &self.options.streaming_base {
            Some(base) => Ok(format!("{base}/{what}/token")),
            None => Err(Status::unimplemented("no streaming server")),
        }
    }
}
