//! Pulls the images of image volumes.

use k8s_cri::v1 as cri;
use k8s_openapi::api::core::v1::{Container, Pod};
use pod_sync_clients::CallError;
use pod_sync_decisions::backoff::{BackoffDelays, ImagePullBackoffs};
use pod_sync_decisions::container_status::WaitingReason;
use pod_sync_decisions::waiting::StartFailure;
use quintlet_model::pod as pods;

use super::{Halt, Worker};
use crate::image;
use crate::image::NoImage;

impl Worker {
    /// Pulls the images of the image volumes that these containers mount. The containers wait with the reason of a failure.
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
        let mut pulls = self.record.pulls.clone();
        let mut interrupted = None;
        for (name, source) in volumes.filter_map(|v| Some((&v.name, v.image.as_ref()?))) {
            let (ctx, secrets) = (self.ctx.pull_context(), self.setup.pull_secrets.clone());
            let wanted = image::Wanted {
                pod,
                image: source.reference.as_deref().unwrap_or_default(),
                policy: source.pull_policy.as_deref().unwrap_or("IfNotPresent"),
                field_path: "",
                secrets: &secrets,
                sandbox_config,
            };
            let ready = image::ensure(&ctx, wanted, &mut pulls, || self.report_sandbox_ready()).await;
            let ready = match ready {
                Ok(ready) => Ok(cri::ImageSpec {
                    image: ready.image_ref,
                    user_specified_image: wanted.image.to_owned(),
                    runtime_handler: self.setup.runtime_handler.clone(),
                    annotations: pod.metadata.annotations.clone().unwrap_or_default().into_iter().collect(),
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
            self.setup.image_volumes.insert(name.clone(), ready);
        }
        self.record.update(|record| record.pulls = pulls);
        interrupted.map_or(Ok(()), Err)
    }

    /// Returns the waiting reason of a container if the outcome of an image call stays unknown. A pull gets a
    /// back-off in `pulls`.
    pub(super) fn image_failure(
        &mut self,
        e: &CallError,
        container: &str,
        image: &str,
        pulls: &mut ImagePullBackoffs,
    ) -> Option<WaitingReason> {
        if !self.is_failure(e, container, image) {
            return None;
        }
        if e.method != "PullImage" {
            return Some(StartFailure::ImageInspectError.with_message(e.message.clone()));
        }
        let (reason, boot) = (StartFailure::ErrImagePull, self.ctx.clock.boot());
        if let Ok(tagged) = image::with_tag(image) {
            pulls.record_failure(&tagged, boot, BackoffDelays::default(), reason.as_str(), &e.message);
        }
        Some(reason.with_message(e.message.clone()))
    }
}
