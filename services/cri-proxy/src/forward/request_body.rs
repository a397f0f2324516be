//! Reads the body of a request, within the byte budget of its socket.

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tonic::Code;

use super::MAX_REQUEST;
use crate::budget::{ByteBudget, Exhausted, GrowingReservation, Reservation};
use crate::reply;

/// Reason why a request is rejected.
#[derive(Debug, thiserror::Error)]
pub(super) enum BadRequest {
    #[error("the request was interrupted: {0}")]
    Interrupted(hyper::Error),
    #[error("the request is larger than {MAX_REQUEST} bytes")]
    TooLarge,
    #[error(transparent)]
    BudgetExhausted(Exhausted),
    #[error(transparent)]
    Frame(reply::BadFrame),
}

impl BadRequest {
    pub(super) fn code(&self) -> Code {
        match self {
            Self::Interrupted(_) | Self::TooLarge | Self::Frame(_) => Code::InvalidArgument,
            Self::BudgetExhausted(_) => Code::ResourceExhausted,
        }
    }
}

/// Reads a request's body. Returns it with its reservation.
pub(super) async fn read_body(
    mut body: Incoming,
    budget: &ByteBudget,
) -> Result<(Bytes, Reservation), BadRequest> {
    let mut out = BytesMut::new();
    let mut held = GrowingReservation::default();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(BadRequest::Interrupted)?;
        if let Some(data) = frame.data_ref() {
            if out.len().saturating_add(data.len()) > MAX_REQUEST {
                return Err(BadRequest::TooLarge);
            }
            budget.reserve(&mut held, data.len()).map_err(BadRequest::BudgetExhausted)?;
            out.extend_from_slice(data);
        }
    }
    Ok((out.freeze(), held.finish()))
}
