//! Formats a store error as one line with advice. Never shows XML, a signed URL or a secret.

use std::io;

use object_store::Error;

use super::failure::{
    ErrorResponse, NoResponseReason, Outcome, RequestInfo, TransportError, find_cause, find_transport_error,
};
use super::profile::{CredentialError, NO_CREDENTIALS};

/// Explains an error, for example `cannot write s3://b/k: 403 AccessDenied: the credentials may not do this; …`.
///
/// `action` follows "cannot"; `place` names the object or bucket.
pub fn explain(error: &Error, action: &str, place: &str) -> String {
    format!("cannot {action} {place}: {}", explain_cause(error, place))
}

/// Whether the same call can succeed later: the retry limits were reached, or the local disk failed.
pub fn is_retryable(error: &Error) -> bool {
    match find_transport_error(error) {
        Some(failure) => failure.transient,
        None => {
            let is_answer = matches!(
                error,
                Error::NotFound { .. }
                    | Error::AlreadyExists { .. }
                    | Error::Precondition { .. }
                    | Error::NotModified { .. }
                    | Error::PermissionDenied { .. }
            );
            !is_answer && find_cause::<io::Error>(error).is_some()
        }
    }
}

/// Like [`explain`], without the action and the place: for messages that already name them.
pub fn explain_cause(error: &Error, place: &str) -> String {
    if let Some(failure) = find_transport_error(error) {
        return explain_failure(failure, place);
    }
    if let Some(missing) = find_cause::<CredentialError>(error) {
        return missing.to_string();
    }
    if let Some(io) = find_cause::<io::Error>(error) {
        return io.to_string();
    }
    match error {
        Error::NotFound { .. } => "there is no such object; check the name, and that the bucket exists".into(),
        Error::AlreadyExists { .. } | Error::Precondition { .. } => "it is there already".into(),
        // object_store's HTTP client reports this in an error type that is not public
        Error::NotSupported { source } if source.to_string().contains("Range") => {
            "the web server gives whole files only, and parts of this one are read; valid: a server that answers Range requests, such as nginx \
             or Caddy (Python's http.server does not), or a copy on a disk"
                .into()
        }
        Error::NotImplemented { .. } | Error::NotSupported { .. } => "the store cannot do this".into(),
        other => innermost_text(other),
    }
}

/// The text of the innermost cause. The outer errors repeat it, with addresses.
fn innermost_text(error: &Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    let text = cause.to_string();
    let text = if text.contains("://") || text.contains('<') { "the answer makes no sense".into() } else { text };
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn explain_failure(failure: &TransportError, place: &str) -> String {
    let TransportError { request, outcome, attempts, elapsed, .. } = failure;
    let attempts_note = match attempts {
        0 | 1 => String::new(),
        n => format!(" ({n} attempts in {:.1} s)", elapsed.as_secs_f64()),
    };
    match outcome {
        Outcome::Refused(response) if !request.at_store && request.is_hub() => {
            format!("{}, which keeps contents of the hub, answered {response}{attempts_note}", request.service)
        }
        _ if !request.at_store && !request.is_hub() => explain_credentials(request, outcome),
        Outcome::Refused(response) => format!("{}{attempts_note}", explain_response(response, request, place)),
        Outcome::Broken(reason, text) => format!("{}{attempts_note}", explain_no_response(*reason, text, request)),
    }
}

/// Explains why a credential service returned no credentials.
fn explain_credentials(request: &RequestInfo, outcome: &Outcome) -> String {
    let is_google = request.service.contains("google");
    let is_metadata_service =
        request.service.contains("169.254.") || request.service.contains("metadata.google.internal");
    if is_metadata_service && is_google {
        return "no credentials were found; set GOOGLE_APPLICATION_CREDENTIALS, or for a public bucket `storage: {anonymous: true}`".into();
    }
    if is_metadata_service && request.place.contains("/metadata/identity") {
        return "no credentials were found; set AZURE_STORAGE_ACCOUNT_KEY, or for a public container `storage: {anonymous: true}`".into();
    }
    if is_metadata_service {
        return NO_CREDENTIALS.into();
    }
    let what = match outcome {
        Outcome::Refused(response) => response.to_string(),
        Outcome::Broken(_, text) => text.clone(),
    };
    format!("{} gave no credentials: {what}; check the credentials that it was asked with", request.service)
}

fn explain_response(response: &ErrorResponse, request: &RequestInfo, place: &str) -> String {
    let RequestInfo { service, permission, .. } = request;
    let bucket = bucket_of(&request.place);
    let status = response.status.as_u16();
    let code = response.code.as_deref().or(response.status.canonical_reason()).unwrap_or("unknown");
    let short = format!("{status} {code}");
    let advice = match (status, code) {
        _ if request.is_hub() => return format!("{short}: {}", explain_hub(status, code, response)),
        (_, "NoSuchBucket" | "ContainerNotFound") => {
            return format!("bucket {bucket} does not exist at {service}; check the name, the region and the endpoint");
        }
        (_, "InvalidAccessKeyId") => {
            "the store has no such access key; check AWS_ACCESS_KEY_ID or the AWS profile, and that the key belongs to this endpoint"
                .into()
        },
        (_, "SignatureDoesNotMatch") => "the secret key does not belong to the access key; check AWS_SECRET_ACCESS_KEY or the AWS profile".into(),
        (_, "ExpiredToken" | "TokenRefreshRequired") => "the credentials have expired; get new ones and start again".into(),
        (_, "InvalidToken") => "the session token is not valid; check AWS_SESSION_TOKEN or the AWS profile".into(),
        (_, "RequestTimeTooSkewed") => "the clock of this machine is wrong by more than 15 minutes; set it".into(),
        (_, "InvalidBucketName") => format!("{bucket} is no name that a bucket can have"),
        (301 | 307 | 400, _) if response.region.is_some() => {
            let region = response.region.as_deref().unwrap_or_default();
            format!("bucket {bucket} is in the region {region}; set AWS_REGION={region} or `storage: {{region: {region}}}`")
        }
        (301..=308, _) => format!("bucket {bucket} is in another region or at another endpoint than {service}; set `storage: {{region: …}}`"),
        (401, _) => "the credentials are not accepted; check them, and that they are for this endpoint".into(),
        (403, "Forbidden") => format!("the credentials may not do this or are wrong; check them, and that the policy allows {permission} on {bucket}"),
        (403, _) => format!("the credentials may not do this; check that the policy allows {permission} on {bucket}"),
        (405, _) if request.method.as_str() == "PROPFIND" => "this web server lists no folders; name its files one by one".into(),
        (501, _) => "the store cannot do this; a store for output must do multipart uploads and conditional writes".into(),
        (507, _) => "the store is full; free some space".into(),
        _ => response.message.clone().unwrap_or_else(|| match place == request.place {
            true => format!("{} was not done", request.method),
            false => format!("{} {} was not done", request.method, request.place),
        }),
    };
    format!("{short}: {advice}")
}

/// Explains an error of the hub, or of a server of contents that it named.
fn explain_hub(status: u16, code: &str, response: &ErrorResponse) -> String {
    match (status, code) {
        (_, "GatedRepo") => "the data set is gated; accept its terms on its page of the hub, and set HF_TOKEN to a token that may read it",
        (_, "RevisionNotFound") => "the data set has no such revision; check what follows @ (without it, the branch main is read)",
        (404, "RepoNotFound") => "the hub has no such data set; check the name",
        (401 | 403, _) => {
            "the data set is private or gated, or does not exist; check the name, and set HF_TOKEN to a valid token that may read it"
        }
        (429, _) => "the hub answers no more requests for some minutes; set HF_TOKEN, which allows more of them, or start again later",
        _ => return response.message.clone().unwrap_or_else(|| "the hub refused the request".into()),
    }
    .into()
}

fn explain_no_response(reason: NoResponseReason, text: &str, request: &RequestInfo) -> String {
    let service = &request.service;
    match reason {
        NoResponseReason::UnknownHost => {
            let names = if request.is_hub() { "HF_ENDPOINT" } else { "the endpoint, the bucket" };
            format!("no such host: {service}; check {names} and the network")
        }
        NoResponseReason::ConnectionRefused => {
            format!("no service listens at {service}; check the endpoint, and that the service runs")
        }
        NoResponseReason::NoConnection => {
            format!("{service} cannot be reached: {text}; check the endpoint and the network")
        }
        NoResponseReason::Certificate => format!("the certificate of {service} is not trusted: {text}"),
        NoResponseReason::Timeout => {
            format!("{service} took too long: {text}; see `storage: {{retry: {{request_timeout_seconds: …}}}}`")
        }
        NoResponseReason::Connection
        | NoResponseReason::TooLarge
        | NoResponseReason::Unsendable
        | NoResponseReason::RefusedByGuard => {
            format!("{service}: {text}")
        }
    }
}

/// The bucket of `s3://b/k`, or the host of `https://h/k`.
fn bucket_of(place: &str) -> &str {
    place.split("://").nth(1).and_then(|rest| rest.split('/').next()).unwrap_or(place)
}
