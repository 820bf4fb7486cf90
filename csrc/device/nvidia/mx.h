// Empty: up to sm_90 no matrix instruction takes block scales.
#pragma once
