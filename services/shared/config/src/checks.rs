//! Checks of texts, for [`crate::kind::Kind::Checked`].
#![allow(clippy::missing_errors_doc, reason = "all checks have the same error")]

use std::net::{IpAddr, SocketAddr};

use quintlet_model::cpu_list::CpuList;
use quintlet_model::quantity::Quantity;

/// The problem of an invalid text. In a message, it follows the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidText(&'static str);

/// Checks that a text is a quantity that is not negative.
pub fn quantity(text: &str) -> Result<(), InvalidText> {
    match Quantity::parse(text) {
        Ok(quantity) if quantity >= Quantity::default() => Ok(()),
        Ok(_) => Err(InvalidText("is negative")),
        Err(_) => Err(InvalidText("is not a quantity, expected for example 500m, 2 or 1Gi")),
    }
}

/// Checks that a text is a quantity of any sign: a negative log size disables rotation.
pub fn signed_quantity(text: &str) -> Result<(), InvalidText> {
    Quantity::parse(text).map(drop).map_err(|_| InvalidText("is not a quantity, expected for example 10Mi"))
}

/// Checks that a text is a minimum reclaim: a quantity that is not negative, or a percentage above zero.
pub fn minimum_reclaim(text: &str) -> Result<(), InvalidText> {
    let Some(percent) = text.strip_suffix('%') else { return quantity(text) };
    let digits = percent.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    match percent.parse::<f64>() {
        Ok(percent) if digits && percent > 0.0 => Ok(()),
        Ok(_) => Err(InvalidText("must be positive")),
        Err(_) => Err(InvalidText("is neither a quantity nor a percentage")),
    }
}

/// Checks that a text is an eviction threshold: a quantity above zero, or a percentage.
pub fn threshold(text: &str) -> Result<(), InvalidText> {
    if let Some(percent) = text.strip_suffix('%') {
        let digits = percent.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        return match percent.parse::<f64>() {
            Ok(percent) if digits && (0.0..=100.0).contains(&percent) => Ok(()),
            Ok(_) if digits => Err(InvalidText("is not between 0% and 100%")),
            Ok(_) | Err(_) => Err(InvalidText("is neither a quantity nor a percentage")),
        };
    }
    match Quantity::parse(text) {
        Ok(quantity) if quantity.is_positive() => Ok(()),
        Ok(_) => Err(InvalidText("must be positive")),
        Err(_) => Err(InvalidText("is neither a quantity nor a percentage")),
    }
}

/// Checks that a text is a percentage up to 100, such as `10%`.
pub fn percentage(text: &str) -> Result<(), InvalidText> {
    match text.strip_suffix('%').and_then(|p| p.parse::<u8>().ok()) {
        Some(percent) if percent <= 100 => Ok(()),
        Some(_) => Err(InvalidText("is above 100%")),
        None => Err(InvalidText("is not a percentage, expected for example 50%")),
    }
}

/// Checks that a text is a list of CPUs, such as `0-3,8`.
pub fn cpu_list(text: &str) -> Result<(), InvalidText> {
    CpuList::parse(text)
        .map(drop)
        .map_err(|_| InvalidText("is not a list of CPUs, expected for example 0-3,8"))
}

/// Checks that a text is an IP address.
pub fn address(text: &str) -> Result<(), InvalidText> {
    text.parse::<IpAddr>().map(drop).map_err(|_| InvalidText("is not an IP address"))
}

/// Checks that a text is empty or an IP address.
pub fn address_or_none(text: &str) -> Result<(), InvalidText> {
    if text.is_empty() { Ok(()) } else { address(text) }
}

/// Checks that a text is `unix:///absolute/path`, or the path only.
pub fn unix_endpoint(text: &str) -> Result<(), InvalidText> {
    let path = text.strip_prefix("unix://").unwrap_or(text);
    if path.starts_with('/') { Ok(()) } else { Err(InvalidText("is not unix:///absolute/path")) }
}

/// Checks that a text is an absolute, clean path of ASCII characters, as the kubelet requires for
/// `podLogsDir`.
pub fn clean_path(text: &str) -> Result<(), InvalidText> {
    let clean = text == "/"
        || text.strip_prefix('/').is_some_and(|rest| rest.split('/').all(|p| !matches!(p, "" | "." | "..")));
    match () {
        () if !text.starts_with('/') => Err(InvalidText("is not an absolute path")),
        () if !text.is_ascii() => Err(InvalidText("has letters that are not ASCII")),
        () if !clean => Err(InvalidText("is not a clean path: no //, no trailing /, no . or ..")),
        () => Ok(()),
    }
}

/// Checks that a text is `host:port`, or an `http` or `https` URL.
pub fn collector(text: &str) -> Result<(), InvalidText> {
    let rest = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
    let host = rest.unwrap_or(text).split('/').next().unwrap_or_default();
    let port =
        host.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    if port && host.bytes().all(|b| b.is_ascii_graphic()) {
        Ok(())
    } else {
        Err(InvalidText("is not host:port"))
    }
}

/// Checks that a text is an address to listen on, such as `127.0.0.1:9101`.
pub fn listen(text: &str) -> Result<(), InvalidText> {
    text.parse::<SocketAddr>()
        .map(drop)
        .map_err(|_| InvalidText("is not an address with a port, expected for example 127.0.0.1:9101"))
}
