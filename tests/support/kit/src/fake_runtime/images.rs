//! The image service.

use std::sync::Arc;

use quintlet_cri_api::v1;
use quintlet_cri_api::v1::image_service_server::ImageService;
use tonic::{Request, Response, Status};

use super::lists::{self, ListStream};
use super::script::Method;
use super::shared::Shared;

pub(crate) struct Images(pub(crate) Arc<Shared>);

fn name(spec: &Option<v1::ImageSpec>) -> String {
    spec.as_ref().map(|s| s.image.clone()).unwrap_or_default()
}

#[tonic::async_trait]
impl ImageService for Images {
    type StreamImagesStream = ListStream<v1::StreamImagesResponse>;

    async fn stream_images(
        &self,
        request: Request<v1::StreamImagesRequest>,
    ) -> Result<Response<Self::StreamImagesStream>, Status> {
        let find = |shared: &Shared, q: v1::StreamImagesRequest| lists::images(shared, q.filter);
        let message = |item| v1::StreamImagesResponse { images: vec![item] };
        lists::stream(&self.0, Method::StreamImages, request, Vec::new(), find, message).await
    }

    async fn list_images(
        &self,
        request: Request<v1::ListImagesRequest>,
    ) -> Result<Response<v1::ListImagesResponse>, Status> {
        self.0
            .simple(
                Method::ListImages,
                request,
                |_| Vec::new(),
                |shared, q| Ok(v1::ListImagesResponse { images: lists::images(shared, q.filter) }),
            )
            .await
    }

    async fn image_status(
        &self,
        request: Request<v1::ImageStatusRequest>,
    ) -> Result<Response<v1::ImageStatusResponse>, Status> {
        self.0
            .simple(
                Method::ImageStatus,
                request,
                |q| vec![name(&q.image)],
                |shared, q| {
                    let image = shared.world.lock().image(&name(&q.image)).cloned();
                    Ok(v1::ImageStatusResponse { image, ..Default::default() })
                },
            )
            .await
    }

    async fn pull_image(
        &self,
        request: Request<v1::PullImageRequest>,
    ) -> Result<Response<v1::PullImageResponse>, Status> {
        self.0
            .simple(Method::PullImage, request, |q| vec![name(&q.image)], |shared, q| {
                let image = name(&q.image);
                let mut world = shared.world.lock();
                if !world.gives(&image, q.auth.as_ref()) {
                    let text = format!(
                        "failed to pull and unpack image {image:?}: failed to authorize: 401 Unauthorized"
                    );
                    return Err(Status::unknown(text));
                }
                if image.is_empty() || !(shared.options.registry_has_everything || world.image(&image).is_some()) {
                    let text = format!(
                        "failed to pull and unpack image {image:?}: failed to resolve reference {image:?}: {image}: not found"
                    );
                    return Err(Status::not_found(text));
                }
                let id = match world.image(&image) {
                    Some(present) => present.id.clone(),
                    None => world.add_image(&image, 1 << 20),
                };
                Ok(v1::PullImageResponse { image_ref: id })
            })
            .await
    }

    async fn remove_image(
        &self,
        request: Request<v1::RemoveImageRequest>,
    ) -> Result<Response<v1::RemoveImageResponse>, Status> {
        self.0
            .simple(
                Method::RemoveImage,
                request,
                |q| vec![name(&q.image)],
                |shared, q| {
                    let mut world = shared.world.lock();
                    if let Some(id) = world.image(&name(&q.image)).map(|i| i.id.clone()) {
                        world.images.remove(&id);
                    }
                    Ok(v1::RemoveImageResponse {})
                },
            )
            .await
    }

    async fn image_fs_info(
        &self,
        request: Request<v1::ImageFsInfoRequest>,
    ) -> Result<Response<v1::ImageFsInfoResponse>, Status> {
        self.0
            .simple(
                Method::ImageFsInfo,
                request,
                |_| Vec::new(),
                |shared, _| {
                    let mut world = shared.world.lock();
                    let used = world.images.values().map(|i| i.size).sum();
                    let layers = world.layers.values().sum();
                    let timestamp = world.now();
                    let file_system = |mountpoint: &str, used| v1::FilesystemUsage {
                        timestamp,
                        fs_id: Some(v1::FilesystemIdentifier { mountpoint: mountpoint.to_owned() }),
                        used_bytes: Some(v1::UInt64Value { value: used }),
                        inodes_used: Some(v1::UInt64Value { value: 1 }),
                    };
                    let containers = Some(&world.container_mountpoint).filter(|path| !path.is_empty());
                    Ok(v1::ImageFsInfoResponse {
                        image_filesystems: vec![file_system(&shared.options.image_mountpoint, used)],
                        container_filesystems: containers
                            .map(|mountpoint| file_system(mountpoint, layers))
                            .into_iter()
                            .collect(),
                    })
                },
            )
            .await
    }
}
