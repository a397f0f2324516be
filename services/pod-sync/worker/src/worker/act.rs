//! Performs the actions of a sync: stops, resizes, the sandbox, starts (`pkg/kubelet/kuberuntime: SyncPod`).

use std::net::IpAddr;

use pod_sync_clients::EventType;
use pod_sync_decisions::actions::PodActions;
use pod_sync_decisions::{unsupported, waiting};
use quintlet_cri_api::v1 as cri;
use quintlet_model::ids::SandboxId;
use quintlet_model::pod as pods;

use super::Worker;
use super::halt::{Halt, tolerate_refusal};
use super::pass::Pass;
use super::prepare::Preparation;
use super::removal::Removals;
use super::resize::Resizes;
use super::sandbox::Sandboxes;
use super::start::Starts;
use super::stop::Stops;
use super::terminate::Termination;

impl Worker {
    /// Performs the actions of a pass.
    pub(super) async fn act(&mut self, pass: &Pass, actions: &PodActions) -> Result<(), Halt> {
        if actions.kill_pod {
            self.stops().kill_sandbox(pass, actions).await?;
            if !actions.create_sandbox {
                return Ok(());
            }
        } else {
            self.stops().stop_containers(pass, actions).await?;
            if !actions.reset.is_empty() {
                return Ok(());
            }
        }
        // The cgroup grows before containers with larger requests start in it.
        if let Some(sandbox) = actions.sandbox_id.as_ref().filter(|_| !actions.resize.is_empty()) {
            self.resizes().resize(pass, &actions.resize, sandbox).await?;
        }
        for id in &actions.prune {
            self.removals().remove_container(&pass.runtime, id, actions.create_sandbox).await?;
        }
        if !actions.create_sandbox && !actions.has_starts() {
            return Ok(());
        }
        let config = self.prepare_start(pass, actions).await?;
        let (sandbox, ips) = self.ensure_sandbox(pass, actions, &config).await?;
        self.starts().start_all(pass, actions, &sandbox, &config, &ips).await
    }

    /// Prepares volumes, cgroup and secrets of the pod. Returns the configuration of its sandbox. From here
    /// on, the pass can no longer be cancelled.
    async fn prepare_start(
        &mut self,
        pass: &Pass,
        actions: &PodActions,
    ) -> Result<cri::PodSandboxConfig, Halt> {
        let pod = &pass.pod;
        // A pod whose sandboxes keep failing never has a pass without actions, which would collect them.
        if actions.create_sandbox {
            let collected = self.removals().collect_dead().await;
            tolerate_refusal(&self.tracker.pod_ref, collected)?;
        }
        let mut preparation = self.preparation();
        if actions.create_sandbox {
            for text in unsupported::not_enforced(pod, preparation.node.settings.field_gates) {
                let (kind, reason) = (EventType::Warning, unsupported::NOT_ENFORCED);
                preparation.reporting.events.pod(pod, kind, reason, &text, "");
            }
        }
        preparation.prepare(pass).await?;
        preparation.prepare_claims(pod, actions.create_sandbox).await?;
        preparation.resolve(pod).await?;
        if actions.create_sandbox && !pods::is_static(pod) {
            // Nothing has started yet. The next step checks for cancellation.
            tokio::select! {
                () = self.ctx.control.static_pod_gate.opened() => {}
                () = self.work_loop.cancel.cancelled() => {}
            }
        }
        let host = self.sandboxes().read_resolv_conf().await;
        self.preparation().enter_runtime()?;
        self.sandboxes().config(pod, actions.attempt, actions.create_sandbox, host)
    }

    /// Returns the sandbox of the pod and its addresses. Creates the sandbox if the actions demand it.
    async fn ensure_sandbox(
        &mut self,
        pass: &Pass,
        actions: &PodActions,
        config: &cri::PodSandboxConfig,
    ) -> Result<(SandboxId, Vec<IpAddr>), Halt> {
        if actions.create_sandbox {
            self.tracker.view.meanwhile(waiting::Waiting::SandboxCreating { attempt: actions.attempt });
            let created = self.sandboxes().create(&pass.pod, config.clone()).await?;
            self.ctx.control.static_pod_gate.release(&self.tracker.pod_ref.uid);
            return Ok(created);
        }
        let id = actions.sandbox_id.clone().ok_or_else(|| {
            let message = "no sandbox to start containers in".to_owned();
            Halt::failed(waiting::Waiting::SandboxFailing { message: message.clone() }, message)
        })?;
        Ok((id, pass.runtime.ips().to_vec()))
    }

    pub(super) fn stops(&mut self) -> Stops<'_> {
        Stops { ctx: self.ctx.stop_context(), tracker: &mut self.tracker, wakeup: &self.work_loop.wakeup }
    }

    pub(super) fn removals(&mut self) -> Removals<'_> {
        Removals {
            clock: &self.ctx.clock,
            node: &self.ctx.node,
            runtime: &self.ctx.runtime,
            reporting: &self.ctx.reporting,
            tracker: &mut self.tracker,
        }
    }

    pub(super) fn preparation(&mut self) -> Preparation<'_> {
        Preparation {
            clock: &self.ctx.clock,
            node: &self.ctx.node,
            runtime: &self.ctx.runtime,
            reporting: &self.ctx.reporting,
            checkpoints: &self.ctx.checkpoints,
            environment: &self.ctx.environment,
            control: &self.ctx.control,
            cancel: &self.work_loop.cancel,
            tracker: &mut self.tracker,
            retries: &mut self.retries,
            setup: &mut self.setup,
        }
    }

    fn sandboxes(&mut self) -> Sandboxes<'_> {
        Sandboxes {
            clock: &self.ctx.clock,
            node: &self.ctx.node,
            runtime: &self.ctx.runtime,
            reporting: &self.ctx.reporting,
            environment: &self.ctx.environment,
            control: &self.ctx.control,
            pod_ref: &self.tracker.pod_ref,
            setup: &self.setup,
            observer: &mut self.tracker.observer,
            retries: &mut self.retries,
        }
    }

    pub(super) fn starts(&mut self) -> Starts<'_> {
        Starts {
            clock: &self.ctx.clock,
            node: &self.ctx.node,
            runtime: &self.ctx.runtime,
            reporting: &self.ctx.reporting,
            checkpoints: &self.ctx.checkpoints,
            environment: &self.ctx.environment,
            images: &self.ctx.images,
            control: &self.ctx.control,
            wakeup: &self.work_loop.wakeup,
            cancel: &self.work_loop.cancel,
            tracker: &mut self.tracker,
            retries: &mut self.retries,
            setup: &mut self.setup,
        }
    }

    fn resizes(&mut self) -> Resizes<'_> {
        Resizes {
            clock: &self.ctx.clock,
            node: &self.ctx.node,
            runtime: &self.ctx.runtime,
            reporting: &self.ctx.reporting,
            checkpoints: &self.ctx.checkpoints,
            environment: &self.ctx.environment,
            pod_ref: &self.tracker.pod_ref,
            retries: &mut self.retries,
        }
    }

    pub(super) fn termination(&mut self) -> Termination<'_> {
        Termination {
            clock: &self.ctx.clock,
            node: &self.ctx.node,
            runtime: &self.ctx.runtime,
            reporting: &self.ctx.reporting,
            environment: &self.ctx.environment,
            control: &self.ctx.control,
            cancel: &self.work_loop.cancel,
            wakeup: &self.work_loop.wakeup,
            tracker: &mut self.tracker,
        }
    }
}
