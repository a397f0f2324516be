//! Performs the actions of a sync: stops, resizes, the sandbox, starts (`pkg/kubelet/kuberuntime: SyncPod`).

use std::net::IpAddr;
use std::time::Duration;

use k8s_cri::v1 as cri;
use k8s_openapi::api::core::v1::{Container, Pod};
use pod_sync_clients::EventType;
use pod_sync_decisions::actions::PodActions;
use pod_sync_decisions::worker::Input;
use pod_sync_decisions::{unsupported, waiting};
use quintlet_model::ids::SandboxId;
use quintlet_model::pod as pods;

use super::pending_starts::{ContainerKind, DueStarts, ephemeral_containers};
use super::start::{NotStarted, StartSpec};
use super::{Halt, Pass, Step, Worker, jitter};

impl Worker {
    pub(super) async fn act(
        &mut self,
        pass: &Pass,
        actions: &PodActions,
        due: &DueStarts,
    ) -> Result<(), Halt> {
        if actions.kill_pod {
            self.kill_sandbox(pass, actions).await?;
            if !actions.create_sandbox {
                return Ok(());
            }
        } else {
            self.stop_containers(pass, actions).await?;
            if !actions.reset.is_empty() {
                return Ok(());
            }
        }
        // The cgroup grows before containers with larger requests start in it.
        if let Some(sandbox) = actions.sandbox_id.as_ref().filter(|_| !actions.resize.is_empty()) {
            self.resize(pass, &actions.resize, sandbox).await?;
        }
        for id in &actions.prune {
            self.remove_container(&pass.pod, &pass.runtime, id, actions.create_sandbox).await?;
        }
        if !actions.create_sandbox && !due.has_starts() {
            return Ok(());
        }
        let config = self.prepare_start(pass, actions).await?;
        let (sandbox, ips) = self.ensure_sandbox(pass, actions, &config).await?;
        self.start_all(pass, due, &sandbox, &config, &ips).await
    }

    async fn kill_sandbox(&mut self, pass: &Pass, actions: &PodActions) -> Result<(), Halt> {
        if actions.create_sandbox && actions.sandbox_id.is_some() {
            self.ctx.reporting.events.pod(
                &pass.pod,
                EventType::Normal,
                "SandboxChanged",
                "Pod sandbox changed, it will be killed and re-created.",
                "",
            );
        }
        if !pass.runtime.is_quiet() {
            self.kill_pod(&pass.runtime, None).await?;
        }
        Ok(())
    }

    // Stops containers, and removes those that a restart of all containers resets.
    async fn stop_containers(&mut self, pass: &Pass, actions: &PodActions) -> Result<(), Halt> {
        let (pod, runtime) = (&pass.pod, &pass.runtime);
        for kill in &actions.containers_to_kill {
            self.kill_one(pod, runtime, &kill.id, &kill.message, Some(kill.reason), None).await?;
        }
        for reset in &actions.reset {
            if reset.kill {
                self.kill_one(pod, runtime, &reset.id, "killing", None, Some(0)).await?;
            }
            let removed = self.ctx.runtime.calls.remove_container(&reset.id).await;
            removed.map_err(|e| Halt::of(&e, Step::RemoveContainer))?;
        }
        Ok(())
    }

    // Prepares volumes, cgroup and secrets of the pod. Returns the configuration of its sandbox. From here on, the pass can no
    // longer be cancelled.
    async fn prepare_start(
        &mut self,
        pass: &Pass,
        actions: &PodActions,
    ) -> Result<cri::PodSandboxConfig, Halt> {
        let pod = &pass.pod;
        // A pod whose sandboxes keep failing never has a pass without actions, which would collect them.
        if actions.create_sandbox {
            let collected = self.collect_dead().await;
            self.tolerate_refusal(collected)?;
        }
        self.refuse_claims(pod)?;
        if actions.create_sandbox {
            for text in unsupported::not_enforced(pod) {
                self.ctx.reporting.events.pod(pod, EventType::Warning, unsupported::NOT_ENFORCED, &text, "");
            }
        }
        self.prepare(pass).await?;
        self.resolve(pod).await?;
        if actions.create_sandbox && !pods::is_static(pod) {
            // Nothing has started yet. The next step checks for cancellation.
            tokio::select! {
                () = self.ctx.control.static_pod_gate.opened() => {}
                () = self.work_loop.cancel.cancelled() => {}
            }
        }
        let host = self.read_resolv_conf().await;
        self.enter_runtime()?;
        self.sandbox_config(pod, actions.attempt, actions.create_sandbox, host)
    }

    // Returns the sandbox of the pod and its addresses. Creates the sandbox if the actions demand it.
    async fn ensure_sandbox(
        &mut self,
        pass: &Pass,
        actions: &PodActions,
        config: &cri::PodSandboxConfig,
    ) -> Result<(SandboxId, Vec<IpAddr>), Halt> {
        if actions.create_sandbox {
            self.meanwhile(waiting::Waiting::SandboxCreating { attempt: actions.attempt });
            let created = self.create_sandbox(&pass.pod, config.clone()).await?;
            self.ctx.control.static_pod_gate.release(&self.pod_ref.uid);
            return Ok(created);
        }
        let id = actions.sandbox_id.clone().ok_or_else(|| {
            let message = "no sandbox to start containers in".to_owned();
            Halt::failed(waiting::Waiting::SandboxFailing { message: message.clone() }, message)
        })?;
        Ok((id, pass.runtime.ips().to_vec()))
    }

    // Refuses pods with resource claims, with one event per minute until the pod is deleted.
    fn refuse_claims(&self, pod: &Pod) -> Result<(), Halt> {
        const AGAIN: Duration = Duration::from_secs(60);
        let Some(message) = unsupported::unprepared_claims(pod) else { return Ok(()) };
        self.ctx.reporting.events.pod(pod, EventType::Warning, unsupported::CLAIMS_FAILED, &message, "");
        let waiting = waiting::Waiting::SandboxFailing { message: message.clone() };
        Err(Halt::failed(waiting, message).after(jitter(AGAIN)))
    }

    async fn start_all(
        &mut self,
        pass: &Pass,
        due: &DueStarts,
        sandbox: &SandboxId,
        sandbox_config: &cri::PodSandboxConfig,
        ips: &[IpAddr],
    ) -> Result<(), Halt> {
        let pod = &pass.pod;
        let ephemeral = ephemeral_containers(pod);
        let starts: Vec<(ContainerKind, &Container)> = due.in_order(pod, &ephemeral);
        let containers: Vec<&Container> = starts.iter().map(|(_, c)| *c).collect();
        self.ensure_image_volumes(pod, &containers, sandbox_config).await?;
        for (kind, container) in starts {
            // A pod that is to terminate starts no more containers.
            if self.is_ending() {
                return Ok(());
            }
            self.ctx.reporting.metrics.container_starting(kind.label());
            match self
                .start_container(pass, StartSpec { kind, container, sandbox, sandbox_config, ips })
                .await
            {
                Ok(id) => self.record_start(container, &id),
                Err(NotStarted::Waits(failed)) => {
                    self.ctx.reporting.metrics.container_start_failed(kind.label(), &failed.reason.reason);
                    self.record_failed_start(container, failed);
                    if kind.blocks_the_next(container) {
                        break;
                    }
                }
                Err(NotStarted::Ends) => return Ok(()),
                Err(NotStarted::Halt(halt)) => return Err(halt),
            }
        }
        Ok(())
    }

    // From here on, the pass can no longer be cancelled.
    fn enter_runtime(&self) -> Result<(), Halt> {
        self.ctx.control.pod_workers.step(Input::RuntimeReached(self.pod_ref.uid.clone()));
        if self.work_loop.cancel.is_cancelled() { Err(Halt::Cancelled) } else { Ok(()) }
    }
}
