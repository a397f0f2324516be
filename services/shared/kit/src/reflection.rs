//! The gRPC reflection service, whose descriptors are decoded at its first call: they take up to a MiB of memory.

use std::convert::Infallible;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use http::{Request, Response};
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic_reflection::server::{Builder, Error};
use tower::Service;

/// `grpc.reflection.v1` of the internal services and `grpc.health.v1`. Clones share the descriptors.
#[derive(Debug, Clone, Default)]
pub struct Reflection(Arc<OnceLock<Routes>>);

fn routes() -> Result<Routes, Error> {
    let service = Builder::configure()
        .register_encoded_file_descriptor_set(quintlet_proto::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;
    Ok(Routes::new(service))
}

impl Service<Request<Body>> for Reflection {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = <Routes as Service<Request<Body>>>::Future;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let known = self.0.get_or_init(|| {
            // Routes without a service answer UNIMPLEMENTED.
            routes().unwrap_or_else(|error| {
                tracing::error!(%error, "failed to set up reflection");
                Routes::default()
            })
        });
        known.clone().call(request)
    }
}

impl NamedService for Reflection {
    const NAME: &'static str = "grpc.reflection.v1.ServerReflection";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_descriptors_are_valid() {
        assert!(routes().is_ok());
    }
}
