//! Creates containers in a sandbox: image, configuration, restart count.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod};
use pod_sync_clients::{CallError, EventType};
use pod_sync_cri_config::container::{ContainerInput, DeviceAdditions, container_config};
use pod_sync_cri_config::env::{Env, EnvInput, EnvObjects, make_env};
use pod_sync_cri_config::env_files::EnvFiles;
use pod_sync_cri_config::error::ConfigError;
use pod_sync_cri_config::mounts::{MountsInput, block_devices, make_mounts};
use pod_sync_cri_config::security::ImageUser;
use pod_sync_decisions::backoff::{BackoffDelays, ImagePullBackoffs};
use pod_sync_decisions::container_status::WaitingReason;
use pod_sync_decisions::starts::ContainerKind;
use pod_sync_decisions::waiting::{StartFailure, Waiting};
use pod_sync_decisions::{backoff, sync as decide_sync};
use pod_sync_layout::paths;
use quintlet_cri_api::v1 as cri;
use quintlet_kit::failpoint;
use quintlet_kit::task::blocking;
use quintlet_model::ids::ContainerId;
use quintlet_model::pod as pods;
use quintlet_model::runtime::PodRuntime;

use super::claims::add_claims;
use super::halt::Halt;
use super::pass::Pass;
use super::start::{FailedStart, NotStarted, StartSpec, Starts};
use crate::context::ENV_FILES;
use crate::image;
use crate::image::NoImage;

const CREATE: &str = "CreateContainer";
const IF_NOT_PRESENT: &str = "IfNotPresent";

/// Returns the container whose process namespace an ephemeral container joins, if it names one
/// (`targetContainerName`).
fn target<'a>(
    pod: &Pod,
    container: &Container,
    runtime: &'a PodRuntime,
) -> Result<Option<&'a ContainerId>, ConfigError> {
    let ephemeral = pods::spec(pod).ephemeral_containers.iter().flatten().find(|e| e.name == container.name);
    let name = ephemeral.and_then(|e| e.target_container_name.as_deref()).filter(|name| !name.is_empty());
    let Some(name) = name else { return Ok(None) };
    match runtime.newest(name) {
        Some(instance) => Ok(Some(&instance.id)),
        None => Err(ConfigError::invalid(format!("unable to find target container {name}"))),
    }
}

/// Returns the CPUs of a configuration, in the kernel's list format.
fn cpuset(config: &cri::ContainerConfig) -> String {
    let resources = config.linux.as_ref().and_then(|linux| linux.resources.as_ref());
    resources.map(|resources| resources.cpuset_cpus.clone()).unwrap_or_default()
}

impl Starts<'_> {
    /// Pulls the image of a container and creates the container. Returns its id and its restart count.
    pub(super) async fn create_container(
        &mut self,
        pass: &Pass,
        spec: StartSpec<'_>,
    ) -> Result<(ContainerId, u32), NotStarted> {
        let container = spec.container;
        let images = match self.images_of(container) {
            Ok(images) => images,
            Err(reason) => return Err(self.waits_for_image(pass, spec, reason, None)),
        };
        self.tracker.view.meanwhile(Waiting::ContainerCreating { container: container.name.clone() });
        let image = self.ensure_image(pass, spec).await?;
        // The pull may have taken minutes.
        self.unless_ending()?;
        self.tracker.view.meanwhile(Waiting::ContainerCreating { container: container.name.clone() });
        let restarts = self.next_attempt(pass, &container.name).await;
        let made = self.container_config(pass, container, restarts, &image, &images, spec.ips).await;
        let config = match made {
            Ok(made) => made,
            Err(error) => {
                let error = error.to_string();
                self.report_start_error(pass, spec, &error);
                let reason = StartFailure::CreateContainerConfigError.with_message(error);
                return Err(NotStarted::Waits(reason.into()));
            }
        };
        // Recorded before the creation, so that a restarted pod-sync keeps the same delay.
        self.begin_restart(pass, container);
        if spec.kind != ContainerKind::Ephemeral {
            let resources = container.resources.clone().unwrap_or_default();
            self.checkpoints.allocations.actuate(&self.tracker.pod_ref.uid, &container.name, resources);
        }
        self.checkpoints.allocations.flush().await;
        self.environment.placement.start_container(&pass.pod, &container.name).await;
        let cpus = cpuset(&config);
        if let Some(offline) = &self.environment.offline {
            offline.container_runs(&self.tracker.pod_ref.uid).await;
        }
        let (calls, sandbox_config) = (&self.runtime.calls, spec.sandbox_config.clone());
        let created = calls.create_container(spec.sandbox, config, sandbox_config).await;
        let error = created.as_ref().err().map(|e| e.message.as_str());
        self.reporting.metrics.operations.image_volumes_mounted(&pass.pod, container, error);
        match created {
            Ok(id) => {
                self.retries.settled(&container.name, CREATE);
                self.tracker.observer.container_created(&id, spec.sandbox);
                let uid = &self.tracker.pod_ref.uid;
                self.environment.placement.created(uid, &container.name, id.as_str(), &cpus);
                self.reporting.events.pod(
                    &pass.pod,
                    EventType::Normal,
                    "Created",
                    "Container created",
                    &spec.field_path(),
                );
                Ok((id, restarts))
            }
            Err(error) => {
                let failure = StartFailure::CreateContainerError;
                Err(self.call_failed(pass, spec, spec.sandbox.as_str(), &error, failure))
            }
        }
    }

    async fn ensure_image(&mut self, pass: &Pass, spec: StartSpec<'_>) -> Result<image::Ready, NotStarted> {
        let container = spec.container;
        let image = container.image.as_deref().unwrap_or_default();
        let mut pulls = self.tracker.record.pulls.clone();
        let ctx = self.pull_context();
        let (secrets, field_path) = (self.setup.pull_secrets.clone(), spec.field_path());
        let wanted = image::Wanted {
            pod: &pass.pod,
            image,
            policy: self.pull_policy(container.image_pull_policy.as_deref()),
            field_path: &field_path,
            secrets: &secrets,
            sandbox_config: spec.sandbox_config,
        };
        let begins = || {
            self.tracker.view.meanwhile(Waiting::ImagePulling {
                container: container.name.clone(),
                image: image.to_owned(),
            });
            self.tracker.report_sandbox_ready();
        };
        let ready = image::ensure(&ctx, wanted, &mut pulls, begins).await;
        let reason = match ready {
            Ok(ready) => return Ok(ready),
            Err(NoImage::Waits(reason)) => reason,
            Err(NoImage::Interrupted(error)) => self
                .image_failure(&error, &container.name, image, &mut pulls)
                .ok_or_else(|| Halt::interrupted(&error))?,
        };
        self.setup.report_missing_pull_secrets(self.reporting, &pass.pod, &reason);
        Err(self.waits_for_image(pass, spec, reason, Some(pulls)))
    }

    // A registry may be away together with the API server.
    fn pull_policy<'p>(&self, policy: Option<&'p str>) -> &'p str {
        let offline = self.environment.offline.as_ref();
        let is_local = offline.is_some_and(|cache| cache.prefers_local_images(&self.tracker.pod_ref.uid));
        match policy.unwrap_or(IF_NOT_PRESENT) {
            "Always" if is_local => IF_NOT_PRESENT,
            policy => policy,
        }
    }

    fn waits_for_image(
        &self,
        pass: &Pass,
        spec: StartSpec<'_>,
        reason: WaitingReason,
        pulls: Option<ImagePullBackoffs>,
    ) -> NotStarted {
        self.report_start_error(pass, spec, &reason.reason);
        NotStarted::Waits(FailedStart { pulls, ..reason.into() })
    }

    /// Counts the restart of an exited container for its crash-loop back-off.
    fn begin_restart(&mut self, pass: &Pass, container: &Container) {
        let Some(exited) = backoff::last_exit(&pass.runtime, &container.name) else { return };
        let key = backoff::crash_loop_key(&self.tracker.pod_ref, container);
        let (wall, boot) = (self.clock.wall(), self.clock.boot());
        let delays = self.node.crash_loop;
        self.tracker.record.update(|record| {
            let ago = record.crash_loop.finished_ago(&key, exited, wall, boot);
            record.crash_loop.begin_restart(&key, &exited.id, ago, boot, delays);
        });
    }

    /// Returns the images of the container's image volumes, or the reason why one is missing.
    fn images_of(&self, container: &Container) -> Result<BTreeMap<String, cri::ImageSpec>, WaitingReason> {
        let mounts = container.volume_mounts.iter().flatten();
        let images = mounts.filter_map(|m| Some((m.name.clone(), self.setup.image_volumes.get(&m.name)?)));
        images.map(|(name, image)| Ok((name, image.clone()?))).collect()
    }

    async fn container_config(
        &self,
        pass: &Pass,
        container: &Container,
        restarts: u32,
        ready: &image::Ready,
        images: &BTreeMap<String, cri::ImageSpec>,
        ips: &[IpAddr],
    ) -> Result<cri::ContainerConfig, ConfigError> {
        let (pod, node) = (&pass.pod, &self.node.settings);
        let uid = &self.tracker.pod_ref.uid;
        let prepared =
            self.environment.devices.prepare_container(uid, pod, &container.name, self.cancel).await;
        let mut additions: DeviceAdditions =
            prepared.map_err(|error| ConfigError::invalid(error.to_string()))?.into();
        add_claims(self.environment, uid, pod, container, &mut additions)
            .map_err(|error| ConfigError::invalid(error.to_string()))?;
        let objects = EnvObjects::fetch(pod, container, self.environment.objects.as_ref()).await;
        let files = self.env_files(pod, container).await?;
        let env = make_env(EnvInput { pod, container, node, pod_ips: ips, objects: &objects }, files)?;
        let mounts = self.mounts(pod, container, images, &env, ips).await?;
        let (spec, volumes) = (container.clone(), self.setup.volumes.clone().unwrap_or_default());
        let devices = blocking(move || block_devices(&spec, &volumes)).await?;
        let log_dir = paths::pod_log_dir(&node.pod_logs_dir, &self.tracker.pod_ref).join(&container.name);
        let dir = log_dir.clone();
        let make =
            move || failpoint::file!("container's log directory made", || std::fs::create_dir_all(&dir));
        blocking(make).await.map_err(|e| {
            ConfigError::invalid(format!("create container log directory {}: {e}", log_dir.display()))
        })?;
        let user = ImageUser::from_status(ready.image.uid.as_ref().map(|u| u.value), &ready.image.username);
        container_config(ContainerInput {
            pod,
            names: &self.tracker.pod_ref,
            container,
            restarts,
            image_ref: &ready.image_ref,
            image_user: &user,
            node,
            env: &env,
            mounts: &mounts,
            devices: &devices,
            additions: &additions,
            placement: &self.environment.placement.container(uid, &container.name),
            runtime_handler: &self.setup.runtime_handler,
            features: self.runtime.features(&self.setup.runtime_handler),
            userns: self.setup.user_namespace.as_ref(),
            volume_groups: &self.environment.volume_tasks.groups(pod, &self.tracker.pod_ref.uid),
            target_id: target(pod, container, &pass.runtime)?.map(ContainerId::as_str),
        })
    }

    async fn env_files(&self, pod: &Arc<Pod>, container: &Container) -> Result<EnvFiles, ConfigError> {
        if !EnvFiles::are_used(container) {
            return Ok(EnvFiles::default());
        }
        let volumes = self.setup.volumes.iter().flatten();
        let paths: BTreeMap<_, _> = volumes.map(|(name, v)| (name.clone(), v.host_path.clone())).collect();
        // The next attempt begins no second read while this one hangs.
        let place = self.node.pod_dir(&self.tracker.pod_ref.uid).join(&container.name);
        let (pod, container) = (Arc::clone(pod), container.clone());
        let read =
            move || failpoint::file!("variable files read", || EnvFiles::read(&pod, &container, &paths));
        self.environment.env_files.run_one(&place, ENV_FILES, read).await.ok_or_else(|| {
            ConfigError::invalid("couldn't read the files of FileKeyRef: the file system does not answer")
        })
    }

    // If no instance is left, the log files give the number of attempts.
    async fn next_attempt(&self, pass: &Pass, container: &str) -> u32 {
        let dir = paths::pod_log_dir(&self.node.settings.pod_logs_dir, &self.tracker.pod_ref).join(container);
        let read = move || -> Vec<String> {
            let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
            entries.filter_map(|e| e.file_name().into_string().ok()).collect()
        };
        let names = blocking(read).await;
        decide_sync::next_attempt(&pass.runtime, container, names.iter().map(String::as_str))
    }

    async fn mounts(
        &self,
        pod: &Pod,
        container: &Container,
        images: &BTreeMap<String, cri::ImageSpec>,
        env: &Env,
        pod_ips: &[IpAddr],
    ) -> Result<Vec<cri::Mount>, ConfigError> {
        let features = self.runtime.features(&self.setup.runtime_handler);
        let userns = self.setup.user_namespace.clone();
        let (pod, container) = (pod.clone(), container.clone());
        let (images, env) = (images.clone(), env.clone());
        let (uid, pod_ips) = (self.tracker.pod_ref.uid.clone(), pod_ips.to_vec());
        let node = Arc::clone(&self.node.settings);
        let volumes = self.setup.volumes.clone().unwrap_or_default();
        // It mounts and writes files.
        blocking(move || {
            make_mounts(MountsInput {
                pod: &pod,
                uid: &uid,
                container: &container,
                node: &node,
                volumes: &volumes,
                images: &images,
                env: &env,
                pod_ips: &pod_ips,
                features,
                id_mappings: userns.as_ref().map(|n| (&n.uids[..], &n.gids[..])),
            })
        })
        .await
    }

    /// Pulls the images of the image volumes that these containers mount. The containers wait with the reason
    /// of a failure.
    pub(super) async fn ensure_image_volumes(
        &mut self,
        pod: &Pod,
        containers: &[&Container],
        sandbox_config: &cri::PodSandboxConfig,
    ) -> Result<(), Halt> {
        self.setup.image_volumes.clear();
        let mounted =
            |name: &str| containers.iter().any(|c| c.volume_mounts.iter().flatten().any(|m| m.name == name));
        let volumes = pods::spec(pod).volumes.iter().flatten().filter(|v| mounted(&v.name));
        let mut pulls = self.tracker.record.pulls.clone();
        let mut interrupted = None;
        for (name, source) in volumes.filter_map(|v| Some((&v.name, v.image.as_ref()?))) {
            let (ctx, secrets) = (self.pull_context(), self.setup.pull_secrets.clone());
            let wanted = image::Wanted {
                pod,
                image: source.reference.as_deref().unwrap_or_default(),
                policy: self.pull_policy(source.pull_policy.as_deref()),
                field_path: "",
                secrets: &secrets,
                sandbox_config,
            };
            let ready = image::ensure(&ctx, wanted, &mut pulls, || self.tracker.report_sandbox_ready()).await;
            let ready = match ready {
                Ok(ready) => Ok(cri::ImageSpec {
                    image: ready.image_ref,
                    user_specified_image: wanted.image.to_owned(),
                    runtime_handler: self.setup.runtime_handler.clone(),
                    annotations: pod.metadata.annotations.clone().unwrap_or_default().into_iter().collect(),
                    ..cri::ImageSpec::default()
                }),
                Err(NoImage::Waits(reason)) => Err(reason),
                // The containers that mount the volume wait with this reason.
                Err(NoImage::Interrupted(e)) => {
                    match self.image_failure(&e, name, wanted.image, &mut pulls) {
                        Some(reason) => Err(reason),
                        None => {
                            interrupted = Some(Halt::interrupted(&e));
                            break;
                        }
                    }
                }
            };
            if let Err(reason) = &ready {
                self.setup.report_missing_pull_secrets(self.reporting, pod, reason);
            }
            self.setup.image_volumes.insert(name.clone(), ready);
        }
        self.tracker.record.update(|record| record.pulls = pulls);
        interrupted.map_or(Ok(()), Err)
    }

    /// Returns the waiting reason of a container if the outcome of an image call stays unknown. A pull gets a
    /// back-off in `pulls`.
    fn image_failure(
        &mut self,
        e: &CallError,
        container: &str,
        image: &str,
        pulls: &mut ImagePullBackoffs,
    ) -> Option<WaitingReason> {
        if !self.retries.is_failure(e, container, image, self.clock.boot()) {
            return None;
        }
        if e.method != "PullImage" {
            return Some(StartFailure::ImageInspectError.with_message(e.message.clone()));
        }
        let (reason, boot) = (StartFailure::ErrImagePull, self.clock.boot());
        if let Ok(tagged) = image::with_tag(image) {
            pulls.record_failure(&tagged, boot, BackoffDelays::default(), reason.as_str(), &e.message);
        }
        Some(reason.with_message(e.message.clone()))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use quintlet_testkit::pods::RuntimeBuilder;

    #[test]
    fn an_ephemeral_container_sees_the_newest_instance_of_its_target_or_is_not_made() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p"},
            "spec": {
                "containers": [{"name": "main"}],
                "ephemeralContainers": [
                    {"name": "look", "targetContainerName": "main"},
                    {"name": "lost", "targetContainerName": "gone"},
                    {"name": "free", "targetContainerName": ""},
                ],
            },
        }))
        .unwrap();
        let runtime = RuntimeBuilder::ready().exited("main", 1).running("main").build();
        let joined = |name: &str| {
            let container: Container = serde_json::from_value(json!({"name": name})).unwrap();
            target(&pod, &container, &runtime)
                .map(|id| id.map(ToString::to_string))
                .map_err(|e| e.to_string())
        };
        assert_eq!(joined("look"), Ok(Some("main-1".to_owned())));
        assert_eq!(joined("lost"), Err("unable to find target container gone".to_owned()));
        assert_eq!((joined("free"), joined("main")), (Ok(None), Ok(None)));
    }
}
