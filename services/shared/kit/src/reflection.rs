//! The gRPC reflection service, whose descriptors are decoded at its first call: they take up to a MiB of
//! memory.

use std::convert::Infallible;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use http::{Request, Response};
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic_reflection::server::{Builder, Error};
use tower::Service;

/// Largest request: the name of a symbol or a file.
const MOST_REQUEST_BYTES: usize = 64 << 10;

/// `grpc.reflection.v1` of the internal services and `grpc.health.v1`. Clones share the descriptors.
#[derive(Debug, Clone, Default)]
pub struct Reflection {
    known: Arc<OnceLock<Routes>>,
    /// The services that the list has; all if empty.
    names: Vec<&'static str>,
}

impl Reflection {
    /// Returns reflection whose list of services has these names alone.
    #[must_use]
    pub fn of(names: Vec<&'static str>) -> Self {
        Self { known: Arc::default(), names }
    }
}

fn routes(names: &[&str]) -> Result<Routes, Error> {
    let service = names
        .iter()
        .fold(Builder::configure(), |builder, name| builder.with_service_name(*name))
        .register_encoded_file_descriptor_set(quintlet_proto::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?
        .max_decoding_message_size(MOST_REQUEST_BYTES);
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
        let known = self.known.get_or_init(|| {
            // Routes without a service answer UNIMPLEMENTED.
            routes(&self.names).unwrap_or_else(|error| {
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
        assert!(routes(&[]).is_ok());
    }
}
