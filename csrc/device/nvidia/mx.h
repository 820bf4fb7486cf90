// Empty: no matrix instruction up to sm_90 supports block scales.
#pragma once
